"""Test that examples in docstrings run as they stand, and that every public name has one."""

import doctest
import importlib
import importlib.util
import inspect
import io
import pkgutil

import jax
import pages
import pytest

import jax_nvfp4_moe as nvfp4

pytestmark = pytest.mark.every_case  # each docstring has another example
MODULES = (nvfp4, nvfp4.ops, nvfp4.testing)
# Modules that need a package of an extra -> the package.
OF_EXTRAS = {"harness": "lm_eval", "qwix_provider": "qwix", "swap_maxtext": "qwix"}
PARSER = doctest.DocTestParser()


def modules():
    """Yield the modules of the package; compiled ones have no docstrings."""
    yield nvfp4
    for found in pkgutil.walk_packages(nvfp4.__path__, f"{nvfp4.__name__}."):
        name = found.name.rpartition(".")[2]
        if name in OF_EXTRAS and importlib.util.find_spec(OF_EXTRAS[name]) is None:
            continue
        if not name.startswith("_nvfp4_") and name != "__main__":
            yield importlib.import_module(found.name)


def members(value, name):
    """Yield a name and its value, and then the methods and properties of a class."""
    yield name, value
    if inspect.isclass(value):
        for own, member in vars(value).items():
            member = getattr(member, "__func__", member)  # unwraps a class method
            if callable(member) or isinstance(member, property):  # leaves out defaults of fields
                yield f"{name}.{own}", member


def docstrings():
    """Return name -> docstring, once each, of everything that modules of the package define.

    `doctest.DocTestFinder` would skip functions under `jax.jit`.
    """
    found = {}
    for module in modules():
        texts = {module.__name__: module.__doc__}
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) == module.__name__:  # other names are imported
                for path, member in members(value, f"{module.__name__}.{name}"):
                    texts[path] = member.__doc__
        for path, text in texts.items():
            if isinstance(text, str):
                found.setdefault(text, path.removeprefix(f"{nvfp4.__name__}."))
    return {path: text for text, path in found.items()}


def has_example(text):
    return bool(text and PARSER.get_examples(inspect.cleandoc(text)))


def run(text, name):
    """Run the examples of a docstring, and return what doctest reports about failures."""
    test = PARSER.get_doctest(inspect.cleandoc(text), {}, name, name, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    said = io.StringIO()
    runner.run(test, out=said.write)
    return said.getvalue()


EXAMPLES = {name: text for name, text in docstrings().items() if has_example(text)}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_prints_what_it_says(name, tmp_path, monkeypatch):
    """Examples run with JAX's default promotion, as for users, and in an empty folder."""
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        failures = run(EXAMPLES[name], name)
    assert failures == ""


def public_names():
    """Return public path -> value, without `__version__`, which is text and has no docstring."""
    return {
        f"{module.__name__}.{name}".removeprefix(f"{nvfp4.__name__}."): value
        for module in MODULES
        for name, value in pages.public(module).items()
        if name != "__version__"
    }


def without_example(names):
    """Return the names that have no example in their docstring or in that of their `__init__`."""
    return [
        name
        for name, value in names.items()
        if not has_example(value.__doc__)
        and not (inspect.isclass(value) and has_example(value.__init__.__doc__))
    ]


def test_public_names_are_those_of_the_package():
    names = public_names()
    assert {"load_model", "ops.moe_mlp", "testing.random_routing"} <= names.keys()
    assert {n for n in names if "." not in n} == set(nvfp4.__all__) - {
        "__version__",
        "ops",
        "testing",
    }
    assert {n.removeprefix("ops.") for n in names if n.startswith("ops.")} == set(nvfp4.ops.__all__)


def test_every_public_name_has_an_example():
    assert without_example(public_names()) == []


def test_a_public_name_without_an_example_is_noticed():
    def plain():
        """Say nothing of how it is called."""

    def shown():
        """Return two.

        Example:
          >>> 1 + 1
          2
        """

    assert without_example({"plain": plain, "shown": shown}) == ["plain"]
    assert run(shown.__doc__, "shown") == ""
    assert "Expected:" in run(shown.__doc__.replace("  2\n", "  3\n"), "shown")
