"""The shell: pumps the machines over the carriers. The only room that knows both the clock and the sockets;
no torch."""
