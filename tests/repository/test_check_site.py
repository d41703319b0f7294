"""Test that the checks of the site find faults; a stage of CI runs them on the site itself."""

import queue
import urllib.request

import check_site
import pytest

PAGE = '<html><body><main><h1 id="a">Title<a href="#a">#</a></h1>{}</main></body></html>'


@pytest.fixture
def site(tmp_path):
    def write(**bodies):
        for name, body in bodies.items():
            (tmp_path / f"{name}.html").write_text(PAGE.format(body), encoding="utf-8")
        return tmp_path, check_site.read_pages(tmp_path)

    return write


def test_links_that_lead_somewhere_are_no_faults(site):
    links = '<a href="other.html#a">x</a> <a href="#a">x</a> <a href="https://x.org/y#z">x</a>'
    assert list(check_site.find_broken_links(*site(page=links, other=""))) == []


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ("missing.html", "page.html: broken link: missing.html"),
        ("other.html#b", "page.html: link to a section that is not there: other.html#b"),
        ("#b", "page.html: link to a section that is not there: #b"),
        ("mailto:owner/model@main", "link to a mail address: mailto:owner/model@main"),
    ],
)
def test_a_broken_link_is_found(site, link, fault):
    found = list(check_site.find_broken_links(*site(page=f'<a href="{link}">x</a>', other="")))
    assert len(found) == 1
    assert fault in found[0]


def test_a_picture_that_is_not_there_is_found(site):
    assert list(check_site.find_broken_links(*site(page='<img src="a.svg">'))) == [
        "page.html: broken link: a.svg"
    ]


@pytest.mark.parametrize("body", ["<p>run \u2013errors</p>", "<p>By Author name not set</p>"])
def test_a_wrong_text_is_found(site, body):
    assert len(list(check_site.find_wrong_texts(site(page=body)[1]))) == 1


def test_dashes_between_words_and_in_scripts_are_no_faults(site):
    body = "<p>2020\u20132021, a \u2013 b</p><script>x = ' \u2013errors'</script>"
    assert list(check_site.find_wrong_texts(site(page=body)[1])) == []


def test_the_path_of_a_module_is_no_title():
    pages = {
        title: check_site.Page(f"<h1>{title}<a>#</a></h1>")
        for title in ("inference.exporting", "Export", "Where the time goes")
    }
    assert list(check_site.find_wrong_texts(pages)) == [
        "inference.exporting: the title is the path of a module: inference.exporting"
    ]


def test_a_fence_without_a_language_is_found(tmp_path):
    text = "```python\nx\n```\n\n````{eval-rst}\n```\nx\n```\n````\n\n- a\n\n  ```\n  x\n  ```\n"
    (tmp_path / "a.md").write_text(text, encoding="utf-8")
    assert list(check_site.find_untagged_fences(tmp_path, ["a.md"])) == [
        "a.md:13: code fence without a language"
    ]


def test_the_page_that_measures_names_all_pages(tmp_path):
    """A browser posts the widths. Without one, the test plays its part."""
    (tmp_path / "a.html").write_text("x", encoding="utf-8")
    results = queue.Queue()
    with check_site.serve(tmp_path, check_site.measuring_page(["a.html"], 390), results) as address:
        with urllib.request.urlopen(address) as answer:
            assert '["a.html"]' in answer.read().decode()
        root = address.rpartition("/")[0]
        with urllib.request.urlopen(f"{root}/a.html") as answer:
            assert answer.read() == b"x"
        urllib.request.urlopen(f"{root}/", data=b'{"a.html": [390, []]}').close()
    assert results.get(timeout=10) == b'{"a.html": [390, []]}'


@pytest.mark.chromium
def test_a_page_that_is_too_wide_is_found(tmp_path):
    wide = '<main><div style="width:500px">wide</div></main>'
    boxed = f'<main><div style="overflow-x:auto">{wide}</div></main>'
    head = '<meta name="viewport" content="width=device-width">'
    for name, body in (("wide", wide), ("boxed", boxed), ("narrow", "<main>x</main>")):
        (tmp_path / f"{name}.html").write_text(f"{head}<body>{body}</body>", encoding="utf-8")
    found = list(check_site.find_wide_pages(tmp_path, ["wide.html", "boxed.html", "narrow.html"]))
    assert [fault.partition(":")[0] for fault in found] == ["wide.html"]
    assert "div: wide" in found[0]
