from nucleon.claims import Figure, Panel, Series
from nucleon.report.plots import STYLES, _canvas, draw

X = [1.0, 2.0, 3.0]


def figure(names, panels):
    """The series of some names, dealt to so many panels."""
    series = [Series(name, X, [i + x for x in X], style=i) for i, name in enumerate(names)]
    hands = [tuple(series[first::panels]) for first in range(panels)]
    return Figure("some", "Some", "Caption", tuple(Panel("panel", "x", "y", h) for h in hands))


def test_the_legend_names_the_series_of_every_panel_once():
    names = ("a", "b", "c")
    one = figure(names, 2)
    again = Figure("some", "Some", "Caption", (*one.panels, *one.panels))
    for drawn in (one, again):
        (legend,) = _canvas(drawn).legends
        assert sorted(text.get_text() for text in legend.get_texts()) == list(names)


def test_a_long_legend_stays_inside_the_figure():
    canvas = _canvas(figure([f"a series with a long name, number {i}" for i in range(7)], 1))
    canvas.draw_without_rendering()
    (legend,) = canvas.legends
    box, whole = legend.get_window_extent(), canvas.bbox
    assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and box.y1 <= whole.y1
    (axis,) = (axis for axis in canvas.axes if axis.axison)
    assert axis.title.get_window_extent().y1 < box.y0 or axis.bbox.y1 < box.y0


def test_a_point_alone_is_seen():
    panel = Panel("", "x", "y", (Series("one", [1.0], [2.0]), Series("line", X, X)))
    one, line = _canvas(Figure("some", "", "", (panel,))).axes[0].lines
    assert (one.get_marker(), line.get_marker()) == (STYLES[0].marker, "None")


def test_the_same_data_give_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        draw(figure("ab", 1), tmp_path / name)
    for kind in ("svg", "png"):
        one, two = (tmp_path / name / f"some.{kind}" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def test_no_two_series_look_alike():
    for attribute in ("colour", "marker"):
        assert len({getattr(look, attribute) for look in STYLES}) == len(STYLES)
