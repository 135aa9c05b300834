"""This process on its machine: memory, signals, working hours, and a port that starts a program on demand."""
