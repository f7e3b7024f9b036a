"""The report in a real browser: what it draws and says, against the replay and the plan."""

import json
import re
from dataclasses import replace
from itertools import combinations

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from hybridremat.graph.joint import plain_schedule, short_op
from hybridremat.graph.memory import step_memory
from hybridremat.reports.block_rows import block_rows
from hybridremat.reports.html_page import summary_lines
from hybridremat.reports.whole_step import whole_step
from hybridremat.units import format_bytes, format_time
from support.browsers import chromium
from support.html_pages import joined, planned

TEXT_BOXES = """
return [...document.querySelectorAll('svg')].filter(s => s.clientWidth > 100).map(svg => {
  const box = n => { const b = n.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  return [box(svg), [...svg.querySelectorAll('text')].map(t => [t.textContent, box(t)])];
});
"""
INTO_VIEW = """
const [element, done] = arguments;
element.scrollIntoView({block: 'center'});
requestAnimationFrame(() => requestAnimationFrame(done));
"""
CELLS = """
const text = row => [...row.cells].map(cell => cell.innerText).join('\\t');
return [...document.querySelectorAll(arguments[0])].map(text);
"""
FAINT = """
const painter = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const rgba = colour => {
  painter.clearRect(0, 0, 1, 1);
  painter.fillStyle = colour;
  painter.fillRect(0, 0, 1, 1);
  return [...painter.getImageData(0, 0, 1, 1).data];
};
const linear = part => (part /= 255) <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const behind = element => {
  for (; element; element = element.parentElement) {
    const colour = rgba(getComputedStyle(element).backgroundColor);
    if (colour[3] === 255) return colour;
  }
};
const contrast = element => {
  const style = getComputedStyle(element);
  const ink = rgba(element instanceof SVGElement ? style.fill : style.color);
  const [low, high] = [ink, behind(element)].map(luminance).sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
const texts = [...document.querySelectorAll('body *')].filter(element => element.getClientRects().length &&
  [...element.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.textContent.trim()));
return texts.filter(element => contrast(element) < 4.5).map(element => element.textContent);
"""  # WCAG 2, 1.4.3
COLOURS = """
const of = (selector, what) => getComputedStyle(document.querySelector(selector))[what];
return [of('body', 'backgroundColor'), of('body', 'color'), of('.note', 'color'), of('.band.block', 'fill')];
"""


@pytest.fixture(scope="module")
def plan():
    return planned(8, 0.15)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def address(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "plan.html"
    plan.to_html(path)
    return path.as_uri()


@pytest.fixture
def page(browser, address):
    """The report, just opened, 1280 pixels wide, in light colours; no error may be left in the console."""
    show(browser, address)
    yield browser
    assert browser.get_log("browser") == []


def show(browser, address, *, width=1280, scheme="light"):
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(address)


def find(page, selector):
    return page.find_element(By.CSS_SELECTOR, selector)


def texts(page, selector):
    """Read at once: the page draws charts anew when its size is known, and elements go with them."""
    found = "[...document.querySelectorAll(arguments[0])]"
    return page.execute_script(f"return {found}.map(e => (e.innerText ?? e.textContent).trim())", selector)


def hovered(page, selector, across, down):
    """The tooltip's lines at a place of an element, given as shares of its size."""
    element = find(page, selector)
    page.execute_async_script(INTO_VIEW, element)
    x, y = ((share - 0.5) * element.size[side] for share, side in ((across, "width"), (down, "height")))
    for aside in (1, 0):  # the first move may scroll
        ActionChains(page).move_to_element_with_offset(element, round(x) + aside, round(y)).perform()
    assert find(page, ".tip").is_displayed()
    return find(page, ".tip").text.splitlines()


def test_it_asks_the_network_for_nothing(page, address):
    page.get_log("performance")
    page.get(address)
    assert texts(page, "h1") == ["TinyNet"]
    events = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert address in asked
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("step", "axis"),
    [
        ("planned", "time"),
        ("plain", "executions"),
        pytest.param("planned", "executions", marks=pytest.mark.slow),
        pytest.param("plain", "time", marks=pytest.mark.slow),
    ],
)
def test_the_tooltip_says_the_bytes_of_the_operation(page, plan, step, axis):
    graph = plan.details.graph
    schedule = plan.schedule if step == "planned" else plain_schedule(graph)
    profile = step_memory(graph, schedule).profile
    for kind, choice in (("step", step), ("axis", axis)):
        find(page, f'[data-{kind}="{choice}"]').click()
    seen = set()
    for across in (0.1, 0.3, 0.4, 0.6, 0.8, 0.9):
        total, made, where, *bands = hovered(page, ".timeline", across, 0.5)
        number = int(re.search(r"operation ([\d,]+)", where)[1].replace(",", "")) - 1
        op = graph.ops[schedule.steps[number]]
        assert total == format_bytes(profile[number])
        assert made == short_op(op.target) + (f" in {op.module}" if op.module else "")
        assert where.startswith("forward" if number < schedule.num_forward else "backward")
        assert bands
        seen.add(number)
    assert len(seen) >= 5


def test_below_the_chart_is_what_is_alive_at_the_peak(page, plan):
    graph, memory = plan.details.graph, step_memory(plan.details.graph, plan.schedule)
    title = f"At the peak of the planned step, operation {memory.peak_at + 1} of {len(plan.schedule.steps)}"
    assert texts(page, ".alive h3") == [f"{title}: {format_bytes(memory.peak)}"]
    find(page, ".alive .scroll .plainbutton").click()
    sizes = {v.name: v.bytes for v in graph.values}
    rows = [row.split("\t") for row in cells(page, ".alive tbody tr")]
    named = [(row[0], row[6]) for row in rows]
    own = graph.ops[plan.schedule.steps[memory.peak_at]].temp
    sizes["temporary of this operation"] = own
    assert all(size == format_bytes(sizes[name]) for size, name in named)
    assert sum(sizes[name] for _, name in named) == memory.peak
    assert [sizes[name] for _, name in named] == sorted((sizes[name] for _, name in named), reverse=True)


def test_a_step_of_several_graphs_is_drawn_as_one(browser, tmp_path):
    """Its bands are the graphs, by name, and what is between them."""
    plan = joined(planned(2, 0.5), planned(3, 0.3))
    plan.to_html(tmp_path / "several.html")
    show(browser, (tmp_path / "several.html").as_uri())
    assert len(texts(browser, ".timeline svg")) == 3
    rows = [row.split("\t") for row in cells(browser, '[data-graph="whole"] .alive tbody tr')]
    assert {"graph 1 of 2", "a.unit", "between graphs"} & {row[1].strip() for row in rows}
    (title, *_) = texts(browser, ".alive h3")
    assert title.startswith("At the peak of the planned step")
    assert title.endswith(format_bytes(max(whole_step(plan).totals())))
    _, made, where, *bands = hovered(browser, '[data-graph="whole"] .timeline', 0.3, 0.5)
    assert made and where.startswith("forward, ") and bands
    assert browser.get_log("browser") == []


def cells(page, selector):
    """The text of each row's cells, with tabs between them."""
    return page.execute_script(CELLS, selector)


def test_keys_and_clicks_choose_the_operation(page, plan):
    chart = find(page, ".timeline")
    peak_at = step_memory(plan.details.graph, plan.schedule).peak_at
    assert chart.get_attribute("aria-valuenow") == str(peak_at + 1)
    chart.send_keys(Keys.HOME)
    chart.send_keys(Keys.ARROW_RIGHT)
    assert chart.get_attribute("aria-valuenow") == "2"
    assert "In the planned step, operation 2 of" in texts(page, ".alive h3")[0]
    ActionChains(page).move_to_element(chart).click().perform()
    number = int(re.search(r"operation ([\d,]+)", find(page, ".tip").text)[1].replace(",", ""))
    assert chart.get_attribute("aria-valuenow") == str(number)
    find(page, "[data-peak]").click()
    assert chart.get_attribute("aria-valuenow") == str(peak_at + 1)


@pytest.mark.parametrize(("title", "field"), [("Saved", "saved_bytes"), ("Forward", "forward_time")])
@pytest.mark.parametrize("by_key", [False, True])
def test_headers_sort_the_table(page, plan, title, field, by_key):
    titles = [text.rstrip(" ↑↓") for text in texts(page, ".decisions > .scroll > table > thead th")]
    column = titles.index(title)
    button = page.find_elements(By.CSS_SELECTOR, ".decisions > .scroll > table > thead th button")[column]
    figures = sorted(getattr(row.first, field) for row in block_rows(plan.blocks))
    assert len(set(figures)) > 1
    shown = format_time if field.endswith("time") else format_bytes
    for order, direction in ((figures, "ascending"), (figures[::-1], "descending")):
        button.send_keys(Keys.ENTER) if by_key else button.click()
        rows = cells(page, ".decisions tr.row")
        assert [row.split("\t")[column] for row in rows] == [shown(figure) for figure in order]
        head = page.find_elements(By.CSS_SELECTOR, ".decisions > .scroll > table > thead th")
        assert [h.get_attribute("aria-sort") for h in head].count("none") == len(head) - 1
        assert head[column].get_attribute("aria-sort") == direction


def test_identical_blocks_unfold_and_each_opens_its_values(page, plan):
    row = next(row for row in block_rows(plan.blocks) if len(row.blocks) > 1)
    fold = find(page, f'button[aria-label="Blocks {row.indices}: unfold"]')
    assert visible(page, "tr.child") == 0
    fold.click()
    assert fold.get_attribute("aria-expanded") == "true"
    assert visible(page, "tr.child") == len(row.blocks)
    block = row.blocks[-1]
    find(page, f'button[aria-label="Block {block.index}: values"]').click()
    again = {record.name: times for record, times in block.recomputed}
    saved = {record.name for record in block.saved}
    records = {r.name: r for r in (*block.saved, *(r for r, _ in block.recomputed), *block.freed)}
    found = {line.split("\t")[8]: line.split("\t") for line in cells(page, "table.values tbody tr")}
    assert set(found) == set(records)
    for name, line in found.items():
        words = ["SAVE"] * (name in saved) + [f"RECOMPUTE {again.get(name)}×"] * (name in again)
        assert line[0] == (", ".join(words) or "FREE")
        assert (line[1], line[7]) == (format_bytes(records[name].bytes), format_time(records[name].time))
        assert line[5] == records[name].module
    fold.click()
    assert visible(page, "tr.child, tr.detail") == 0


def visible(page, selector):
    return sum(each.is_displayed() for each in page.find_elements(By.CSS_SELECTOR, selector))


def test_the_frontier_tells_of_the_chosen_plan(page, plan):
    points = plan.details.frontier
    lines = hovered(page, ".frontier .special.chosen", 0.5, 0.5)
    assert lines[0] == format_bytes(plan.predicted_peak)
    assert lines[-1] == "chosen plan"
    assert len(page.find_elements(By.CSS_SELECTOR, ".frontier .dot")) == len(points)
    key = texts(page, ".frontier .key > span")
    assert f"least memory: {format_bytes(points[0].peak)}" in key[2] + key[1]


def test_the_chain_shows_each_block(page, plan):
    names = texts(page, ".chain .boxname")
    assert sorted(names, key=int) == [str(b.index) for b in plan.blocks]
    lines = hovered(page, ".chain .box", 0.5, 0.5)
    assert lines[0] == "Block 0"
    assert f"saves {format_bytes(plan.blocks[0].saved_bytes)}" in lines[2]


def test_dark_and_light_differ_and_both_are_readable(browser, address):
    colours = {}
    for scheme in ("light", "dark"):
        show(browser, address, scheme=scheme)
        colours[scheme] = browser.execute_script(COLOURS)
        paper, *inks = map(lightness, colours[scheme][:3])
        assert all(abs(paper - ink) > 0.35 for ink in inks)
    assert all(a != b for a, b in zip(colours["light"], colours["dark"], strict=True))


def lightness(colour: str) -> float:
    red, green, blue = (int(part) / 255 for part in re.findall(r"\d+", colour)[:3])
    return 0.3 * red + 0.6 * green + 0.1 * blue


@pytest.mark.parametrize("width", [1280, 390, 360])
def test_it_fits_its_width_and_no_text_lies_on_another(browser, address, width):
    show(browser, address, width=width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    drawings = browser.execute_script(TEXT_BOXES)
    assert len(drawings) == 3
    for (left, top, right, bottom), boxes in drawings:
        assert boxes
        for text, box in boxes:
            inside = left - 1 <= box[0] and top - 1 <= box[1] and box[2] <= right + 1 and box[3] <= bottom + 1
            assert inside, text
        for (one, a), (other, b) in combinations(boxes, 2):
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] + 2 or b[3] <= a[1] + 2
            assert apart, (one, other)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out(browser, address, scheme):
    show(browser, address, width=360, scheme=scheme)
    assert browser.execute_script(FAINT) == []


def test_it_can_be_read_without_eyes_or_pointer(page):
    find(page, "[data-block]").click()  # a block's values
    nodes = page.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = {"table", "region", "slider", "image", "button", "DisclosureTriangle"}
    named = [(node["role"]["value"], node["name"]["value"]) for node in nodes if _role(node) in roles]
    assert {role for role, _ in named} == roles
    assert all(name for _, name in named)
    reached = "[...document.querySelectorAll('.scroll, .timeline, button, summary')]"
    unreached = f"{reached}.filter(e => e.tabIndex < 0)"
    assert page.execute_script(f"return {unreached}.map(e => e.outerHTML.slice(0, 80))") == []
    low = "[...document.querySelectorAll('button')].filter(e => 0 < e.offsetHeight && e.offsetHeight < 24)"
    assert page.execute_script(f"return {low}.map(e => e.textContent)") == []


def _role(node) -> str | None:
    return None if node["ignored"] else node["role"]["value"]


def test_the_terms_of_the_plan_unfold(page, plan):
    find(page, ".terms summary").send_keys(Keys.ENTER)
    shown = texts(page, ".terms dt")
    assert shown[:2] == ["most saved", "most recomputed"] and shown[-1] == "terms"
    assert find(page, ".terms dl").is_displayed()
    lines = {name for name, _ in summary_lines(plan)}
    assert not {"limit", "predicted peak", "least feasible", "overhead"} & lines - set(shown)
    assert "graph break" not in shown


def test_print_leaves_the_controls_out(page):
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert not find(page, ".choices").is_displayed()
    assert find(page, ".timeline svg").is_displayed()
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@pytest.mark.parametrize(("times", "drawn"), [(1.0, True), (1.2, True), (3.0, False)])
def test_the_key_names_the_limit_where_it_is_drawn(browser, tmp_path, plan, times, drawn):
    path = tmp_path / "plan.html"
    replace(plan, memory_limit=round(times * plan.plain_peak)).to_html(path)
    show(browser, path.as_uri())
    assert bool(texts(browser, ".timeline line.limit")) == drawn
    assert ("limit" in " ".join(texts(browser, ".key")).split()) == drawn
    assert browser.get_log("browser") == []
