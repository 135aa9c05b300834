"""The message wing: machines that take messages and the time, and give messages and events. No I/O."""
