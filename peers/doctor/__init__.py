"""``p2p-co2 doctor``: can this machine take part, how, and what would make it better, before anything is
downloaded.

``machine`` looks at this machine alone (the part that ``join`` runs too), ``network`` at the way to the
swarm, ``needs`` at what the run asks for. Laws: in under 30 s; nothing of the run is downloaded but its
settings; what could not be found out is "unknown", never "ok". Price: some megabytes of traffic each way.
"""

from peers.doctor.command import DoctorOptions, run_doctor
from peers.doctor.machine import look_at_machine

__all__ = ["DoctorOptions", "look_at_machine", "run_doctor"]
