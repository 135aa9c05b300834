"""Charts as ECharts options: plain data made from facts and history, for the board and for ``report.html``.

Laws: what a peer said is only ever a value in here, never a key (NiceGUI runs keys that begin with a colon),
and tooltips are drawn, not HTML, so no text becomes markup or program. Colours are Okabe and Ito's (2008) and
cividis, told apart by colour-blind readers; outcomes are also told by a letter. Sizes are bounded whatever
the swarm's.
"""

from monitoring.charts.bars import hidden_and_exposed, round_time_line, staleness
from monitoring.charts.lines import column, fragment_lines, loss, mark, over_time
from monitoring.charts.maps import MAX_MATRIX_PEERS, MAX_ROUND_COLUMNS, ages, link_matrix, rounds
from monitoring.charts.parts import (
    BLUE,
    DARK,
    GREEN,
    LIGHT,
    ORANGE,
    OUTCOME_WORDS,
    OUTCOMES,
    PURPLE,
    SKY,
    VERMILLION,
    Options,
    Palette,
)

__all__ = [
    "BLUE",
    "DARK",
    "GREEN",
    "LIGHT",
    "MAX_MATRIX_PEERS",
    "MAX_ROUND_COLUMNS",
    "ORANGE",
    "OUTCOMES",
    "OUTCOME_WORDS",
    "PURPLE",
    "SKY",
    "VERMILLION",
    "Options",
    "Palette",
    "ages",
    "column",
    "fragment_lines",
    "hidden_and_exposed",
    "link_matrix",
    "loss",
    "mark",
    "over_time",
    "round_time_line",
    "rounds",
    "staleness",
]
