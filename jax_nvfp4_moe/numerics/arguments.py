"""Checks of the types of arguments, by the annotations of public functions.

An argument of a wrong type would otherwise fail somewhere inside, with a message that does not name
it: "'list' object has no attribute 'ndim'".
"""

import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jaxtyping

Function = TypeVar("Function", bound=Callable)

# What to write for an argument of a class, by the name of the class.
_ADVICE = {
    "MoEParams": "; `nvfp4.quantize_experts` makes them from arrays",
    "NVFP4Tensor": "; `nvfp4.quantize` makes one from an array",
    "Router": "; for example nvfp4.Router(2)",
    "Target": "; for example nvfp4.Target('cuda', (9, 0)) or nvfp4.Target('cpu')",
}


def check_arguments(function: Function) -> Function:
    """Let a function check its arguments against its annotations before it runs.

    It checks arguments that are annotated with an array of `jaxtyping` or with a class of this
    package, and may also be None. Other annotations say nothing that is checked here.

    Raises:
      TypeError: when the result is called with an argument of another type. The message names the
        argument.
    """
    signature = inspect.signature(function)
    found = {name: _kinds(one.annotation) for name, one in signature.parameters.items()}
    kinds = {name: kind for name, kind in found.items() if kind}
    names = tuple(signature.parameters)

    @functools.wraps(function)
    def checked(*args, **kwargs):
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if name in kinds:
                check_kind(name, value, *kinds[name])
        return function(*args, **kwargs)

    return typing.cast(Function, checked)


def _kinds(annotation) -> tuple[Any, ...]:
    """Return the types that an annotation allows, or nothing if it is not checked."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = typing.get_args(annotation) if union else (annotation,)
    return kinds if all(map(_is_checked, kinds)) else ()


def _is_checked(kind):
    """Return whether a type is None, an array of `jaxtyping`, or a class of this package."""
    if kind is type(None) or _is_array_type(kind):
        return True
    return isinstance(kind, type) and kind.__module__.startswith("jax_nvfp4_moe.")


def _is_array_type(kind):
    """Return whether a type is an array of `jaxtyping`."""
    return isinstance(kind, type) and issubclass(kind, jaxtyping.AbstractArray)


def check_kind(name: str, value: Any, *kinds: Any) -> None:
    """Check the type of one argument.

    Args:
      name: name of the argument.
      value: its value. An `nnx.Variable` stands for the value that it holds.
      *kinds: the types that it may have: classes, and arrays of `jaxtyping`.

    Raises:
      TypeError: it has another type.
    """
    value = value.get_value() if hasattr(value, "get_value") else value
    if not any(_is_of(kind, value) for kind in kinds):
        expected = " or ".join(map(_in_words, kinds))
        advice = "".join(_ADVICE.get(getattr(kind, "__name__", ""), "") for kind in kinds)
        raise TypeError(f"{name}: expected {expected}, got {describe(value)}{advice}")


def _is_of(kind, value):
    """Return whether a value has the type `kind`. A number is an array without axes."""
    if not _is_array_type(kind):
        return isinstance(value, kind)
    number = isinstance(value, numbers.Real) and kind.dim_str.strip() in ("", "*e")
    return number or is_array(value)


def is_array(value: Any) -> bool:
    """Return whether a value has the shape and the dtype of an array; tracers do."""
    return all(hasattr(value, name) for name in ("shape", "dtype", "ndim"))


def _in_words(kind):
    """Return how a message calls a type."""
    if kind is type(None):
        return "None"
    if _is_array_type(kind):
        return f"an array [{', '.join(kind.dim_str.split())}]"
    name = kind.__name__
    return name if name.endswith("s") else f"{'an' if name.startswith('N') else 'a'} {name}"


def describe(value: Any) -> str:
    """Return how a message calls a value of a wrong type."""
    if value is None:
        return "None"
    if isinstance(value, jax.Array) or (is_array(value) and hasattr(value, "itemsize")):
        return f"an array of {value.dtype.name} {tuple(value.shape)}"
    return type(value).__name__


def as_array(name: str, value: Any) -> jax.Array:
    """Return an argument as an array.

    Raises:
      TypeError: it is no array and no nested list of numbers.
    """
    wrong = TypeError(f"{name}: expected an array of numbers, got {describe(value)}")
    if isinstance(value, str | bytes):  # JAX takes them for names of dtypes
        raise wrong
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise wrong from None


def check_size(name: str, size: Any, multiple: int = 1) -> None:
    """Check that a size is a positive integer.

    Args:
      name: name of the argument.
      size: its value.
      multiple: a number that must divide the size, 1 by default.

    Raises:
      TypeError: it is no integer.
      ValueError: it is below `multiple` or not a multiple of it.
    """
    if isinstance(size, bool) or not isinstance(size, numbers.Integral):
        raise TypeError(f"{name}: expected an integer, got {size!r}")
    if int(size) < multiple or int(size) % multiple:
        wanted = f"a positive multiple of {multiple}" if multiple > 1 else "at least 1"
        why = ", the size of an NVFP4 block" if multiple > 1 else ""
        raise ValueError(f"{name}: expected {wanted}{why}, got {size}")


def check_shape(name, shape, expected):
    """Check the shape of an argument.

    Args:
      name: name of the argument, for the message.
      shape: its shape.
      expected: the shape that it must have.

    Raises:
      ValueError: the shapes differ.
    """
    if tuple(shape) != tuple(expected):
        raise ValueError(f"{name}: expected shape {tuple(expected)}, got {tuple(shape)}")
