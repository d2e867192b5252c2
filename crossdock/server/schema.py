"""The bodies that clients send, field by field; what is not named here is refused."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from crossdock.server.errors import ApiError

NOT_YET = frozenset(
    {
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "functions",
        "function_call",
        "best_of",
        "suffix",
        "audio",
        "prediction",
        "reasoning_effort",
        "verbosity",
        "web_search_options",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
        "prompt_logprobs",
        "use_beam_search",
        "length_penalty",
        "bad_words",
        "allowed_token_ids",
        "truncate_prompt_tokens",
        "chat_template",
        "documents",
        "continue_final_message",
        "add_generation_prompt",
        "logits_processors",
        "priority",
    }
)
"""Fields that others know; null, which changes nothing, is accepted."""
_LATER: dict[str, tuple[object, ...]] = {
    "echo": (True,),
    "store": (True,),
    "include_obfuscation": (True,),
    "modalities": ("audio",),
    "role": ("tool", "function"),
    "service_tier": ("flex", "scale", "priority"),
    "type": ("json_object", "json_schema", "structural_tag"),
}
"""Values that others know, by the field's own name."""


_OURS = frozenset(
    {
        "self",
        "chat_template",
        "conversation",
        "messages",
        "tools",
        "documents",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
    }
)
"""What a template is given by us."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _of_the_template(values: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(_OURS & values.keys()):
        raise ValueError(f"{taken[0]} is no variable of the template's own")
    return values


TemplateKwargs = Annotated[dict[str, Any], AfterValidator(_of_the_template)]
"""vLLM's and SGLang's: further variables of the chat template, as Qwen3's enable_thinking."""


def _text_of(content: Any) -> Any:
    """Content parts of type text as one string, a line each."""
    if not isinstance(content, list):
        return content
    for index, part in enumerate(content):
        text_part = isinstance(part, dict) and part.keys() == {"type", "text"}
        if not text_part or part["type"] != "text" or not isinstance(part["text"], str):
            raise ValueError(f"part {index} is not {{'type': 'text', 'text': '...'}}")
    return "\n".join(part["text"] for part in content)


def _asks_for_nothing(field: str, value: Any, values: dict[str, Any]) -> bool:
    """Whether a field of NOT_YET has the value that stands for its absence."""
    match field:
        case "tools":
            return value == []
        case "tool_choice":
            return value in ("none", "auto")  # among no tools; others are refused as such
        case "parallel_tool_calls":
            return isinstance(value, bool)
        case "suffix":
            return value == ""
        case "best_of":
            return type(value) is int and value == (values.get("n") or 1)
    return False


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = NOT_YET | cls.model_fields.keys()
        return {
            k: v
            for k, v in values.items()
            if not (k in known and v is None) and not _asks_for_nothing(k, v, values)
        }


class StreamOptions(_Body):
    """`continuous_usage_stats` (vLLM's): every chunk tells the usage so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class TextFormat(_Body):
    type: Literal["text"]


class _Generation(_Body):
    """What both endpoints share. The last group changes nothing and is accepted for that."""

    model: str | None = None
    max_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict, max_length=1024)
    stop: Annotated[list[str], BeforeValidator(_as_list)] = Field([], max_length=32)
    stop_token_ids: list[int] = Field([], max_length=1024)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] = False
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] = "auto"
    response_format: TextFormat | None = None


class CompletionBody(_Generation):
    prompt: Any
    echo: Literal[False] = False
    logprobs: int | None = None


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_of)]

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        # Clients send back the assistant messages they got, with nulls for what those lacked.
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in values.items() if v is not None}

    def to_template(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


class ChatBody(_Generation):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    modalities: list[Literal["text"]] = ["text"]
    chat_template_kwargs: TemplateKwargs = {}


class TokenizeBody(_Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    chat_template_kwargs: TemplateKwargs = {}


class DetokenizeBody(_Body):
    model: str | None = None
    tokens: list[int]


class LoadBody(_Body):
    action: Literal["start", "stop", "dump", "reset"]


class RebalanceBody(_Body):
    policy: Literal["sticky", "eplb", "quota", "llep"] | None = None


class TraceBody(_Body):
    steps: int = Field(10, ge=1, le=500)
    timeout_s: float = Field(30.0, gt=0, le=600)


Body = TypeVar("Body", bound=_Body)


def parse(cls: type[Body], values: Any) -> Body:
    """Raises ApiError 400 that names the first field at fault."""
    if not isinstance(values, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(values).__name__}")
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    param = str(first["loc"][0]) if first["loc"] else None
    given = repr(first["input"])
    given = given if len(given) <= 80 else given[:80] + "..."
    if first["type"] == "extra_forbidden":
        known = path in NOT_YET
        message = f"{path} is not supported yet" if known else f"{path}: unknown field"
    elif first["type"] == "missing":
        message = f"{path} is required"
    elif first["type"] == "literal_error":
        taken = first["msg"].removeprefix("Input should be ")
        name = next(part for part in reversed(first["loc"]) if isinstance(part, str))
        if first["input"] in _LATER.get(name, ()):
            message = f"{path}: {given} is not supported yet; {taken} is"
        else:
            choice = "one of " if " or " in taken else ""
            message = f"{path}: unknown value {given}; expected {choice}{taken}"
    elif first["type"] == "too_short" and path == "messages":
        message = "messages: expected at least one message"
    else:
        message = f"{path}: {first['msg'].removeprefix('Value error, ')}, got {given}"
    return ApiError(400, message, param)
