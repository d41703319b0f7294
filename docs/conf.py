"""Settings of Sphinx, which ``python docs`` runs."""

import pathlib
import re
import tomllib
import urllib.parse

import elsewhere
from docutils import nodes
from sphinx.util import inspect
from sphinx.util.nodes import make_refnode

_PROJECT = tomllib.loads(
    (pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
)["project"]


def _repository(address):
    """Return the theme's options that link to the repository, or none for a placeholder."""
    if urllib.parse.urlsplit(address).hostname.endswith(".invalid"):
        return {}
    return {"repository_url": address, "use_repository_button": True}


project = "jax_nvfp4_moe"
release = _PROJECT["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
smartquotes = (
    False  # commands and options keep their hyphens and quotes, in whatever text they stand
)
html_theme = "sphinx_book_theme"  # the theme of JAX and Flax; it loads nothing from other sites
html_theme_options = {
    "footer_content_items": [],  # by default an author and a copyright, which stand in LICENSE
    "navbar_persistent": [],  # by default a second field for searches
    **_repository(_PROJECT["urls"]["Repository"]),
}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = f"{project} {release}"
html_show_copyright = False
html_use_index = False  # the overview of the reference has all names, with what they do
html_show_sourcelink = False

myst_heading_anchors = 2  # links may name a section of another page
default_role = "py:obj"  # a name in single backticks is a link, if the reference has that name
autoclass_content = "both"  # the docstring of a class, and then that of its __init__
autodoc_default_options = {"members": True, "special-members": "__call__"}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
# One line of "Args:" or "Attributes:" may describe several names.
napoleon_use_param = False
napoleon_custom_sections = ["Reference", ("Attributes", "params_style")]


def _shorten(text):
    """Spell the types of JAX as the sources do."""
    text = text and re.sub(r"\b(?:jaxlib\._jax|jax)\.Array\b", "Array", text)
    return text and re.sub(r"<class 'jax\.numpy\.(\w+)'>", r"jnp.\1", text)


def _signature(_app, what, _name, value, _options, arguments, result):
    """Return arguments and result as they read best; Flax hides the arguments of a constructor."""
    if what == "class" and arguments and arguments.startswith("(*args"):
        made = inspect.signature(value.__init__, bound_method=True)
        arguments = inspect.stringify_signature(made, unqualified_typehints=True)
    return _shorten(arguments), _shorten(result)


def _drop_mail(_app, document):
    """Turn links to mail addresses into text: docutils takes ``owner/model@revision`` for one."""
    for link in [*document.findall(nodes.reference)]:
        if link.get("refuri", "").startswith("mailto:"):
            link.replace_self(nodes.Text(link.astext()))


def _resolve(app, environment, node, content):
    """Link a name that Sphinx did not find: a short name of this reference, or one elsewhere."""
    if node.get("refdomain") != "py":
        return None
    target, objects = node["reftarget"], environment.domains["py"].objects
    own = elsewhere.find_own(objects, target)
    if own is not None:
        place = node["refdoc"], objects[own].docname, objects[own].node_id
        return make_refnode(app.builder, *place, content, own)
    address = elsewhere.ADDRESSES.get(target)
    return address and nodes.reference("", "", content, internal=False, refuri=address)


def setup(app):
    """Connect the functions of this file to Sphinx."""
    app.connect("autodoc-process-signature", _signature)
    app.connect("doctree-read", _drop_mail)
    app.connect("missing-reference", _resolve)
