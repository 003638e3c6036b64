from perfmodel.report.table import Table, table_of


def test_columns_mark_numbers_wrapping_cells_and_what_a_narrow_page_omits():
    written = table_of("Plans", " | >tok/s | ~plan | ?weights | >?USD/M", iter([["1", "2", "tp 4", "fp8", "3"]]), caption="best first")
    assert written == Table(
        title="Plans",
        headers=("", "tok/s", "plan", "weights", "USD/M"),
        rows=(("1", "2", "tp 4", "fp8", "3"),),
        right=("tok/s", "USD/M"),
        fold=("plan",),
        optional=("weights", "USD/M"),
        caption="best first",
    )


def test_a_column_without_a_header_may_be_aligned():
    assert table_of("", "> | plan", []) == Table(title="", headers=("", "plan"), rows=(), right=("",))
