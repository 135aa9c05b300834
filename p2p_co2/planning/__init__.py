"""What a run will cost and whether a link is enough, before anybody joins: ``forecast`` for this program,
``simulator`` for methods that wait, ``advice`` for what to change.

Pure arithmetic on numbers that are handed in, without torch or a socket, so that the dashboard may use it
too."""
