"""A product as a roofline: its seconds, and the line that explains them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Product:
    """A product of `rows` x weights, `count` times a step. Seconds: (a^p + b^p)^(1/p) of its
    arithmetic a and its traffic b (a roofline with a rounded ridge)."""

    name: str
    count: int
    flops_per_row: float
    weight_bytes: float
    bytes_per_row: float
    flops_per_s: float
    bytes_per_s: float
    power: float

    def seconds(self, rows: float, padded: float | None = None, active: float = 1.0) -> float:
        """`padded`: rows that the tiles compute; `active`: share of the weights that is read."""
        a = (padded or rows) * self.flops_per_row / self.flops_per_s
        b = (self.weight_bytes * active + rows * self.bytes_per_row) / self.bytes_per_s
        return self.count * rounded(a, b, self.power)

    def line(self, rows: float, padded: float | None = None, active: float = 1.0) -> str:
        padded = padded or rows
        traffic = self.weight_bytes * active + rows * self.bytes_per_row
        return (
            f"{self.name} = {self.count} x roof({padded:,.0f} rows x "
            f"{self.flops_per_row / 1e6:,.1f} MFLOP / {self.flops_per_s / 1e12:,.0f} TFLOP/s, "
            f"{traffic / 1e6:,.1f} MB / {self.bytes_per_s / 1e9:,.0f} GB/s) = "
            f"{_ms(self.seconds(rows, padded, active))}"
        )


def rounded(a: float, b: float, power: float) -> float:
    """The larger of two, raised towards their sum where they are alike."""
    high, low = (a, b) if a > b else (b, a)
    if high <= 0.0:
        return 0.0
    return high * (1.0 + (low / high) ** power) ** (1.0 / power)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f} ms"
