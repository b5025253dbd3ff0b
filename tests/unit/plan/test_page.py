"""The page of a plan is whole and shows every stage."""

from html.parser import HTMLParser

from sirara.plan.page import as_html


class _Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(piped):
    page = as_html(piped)
    parser = _Balanced()
    parser.feed(page)
    assert parser.open == []
    assert "<script" not in page and "http" not in page
    assert page.count('class="bar"') == 4 and page.count('class="line"') == 4
