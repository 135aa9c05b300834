"""Catching up: a late peer fetches rounds that it missed, or a fragment's whole agreed state, from donors.

Machines without I/O or clock. ``policy`` says from heartbeats whether to replay, load or wait. The donor
answers ``Fetch`` with a signed ``Manifest`` of chunk digests and then with chunks; the fetcher deals a queue
of chunks to several donors and checks every one before it keeps it.

Laws: nothing is allocated on a donor's word (sizes must equal what this peer computes from its own model); a
wrong chunk never reaches the caller; every wait has a timer; a donor that is silent, refuses or lies is
replaced and what the others gave is kept. What a donor holds for others is bounded: ``history``, ``donor``.
"""
