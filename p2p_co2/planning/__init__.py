"""What a run will cost and whether a link is enough, before anybody joins: ``forecast`` for this program,
``simulator`` for methods that wait, ``advice`` for what to change.

Pure arithmetic on numbers that are handed in, without torch or a socket, so that the dashboard may use it
too."""

from p2p_co2.planning.advice import Advice, advise
from p2p_co2.planning.exchange import Flow, Link, RoundTime, flow, link_of, round_time
from p2p_co2.planning.forecast import Forecast, Setting, even_fragments, forecast, setting_of

__all__ = [
    "Advice",
    "Flow",
    "Forecast",
    "Link",
    "RoundTime",
    "Setting",
    "advise",
    "even_fragments",
    "flow",
    "forecast",
    "link_of",
    "round_time",
    "setting_of",
]
