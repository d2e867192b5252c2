"""Triton kernels: tensors in, tensors out. Each file holds its torch twin, the oracle of its tests.

They know ranks, slots and rows; nothing else of the project. On a CPU they run in Triton's
interpreter (`TRITON_INTERPRET=1`, set before this room is imported), across real processes.
"""
