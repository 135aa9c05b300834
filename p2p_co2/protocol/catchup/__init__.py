"""Catching up: a late peer fetches rounds that it missed, or a fragment's whole agreed state, from donors.

Machines without I/O or clock. ``policy`` says from heartbeats whether to replay, load or wait. A donor
answers ``Fetch`` with a signed ``Manifest`` of chunk digests, and then with chunks. The fetcher deals the
chunks to several donors, and checks each before it keeps it. A newcomer's buffers come in the same way.

Laws: nothing is allocated on a donor's word, and a wrong chunk never reaches the caller. Every wait has a
timer. A donor that is silent, refuses or lies is replaced, and what the others gave is kept. What a donor
holds for others is bounded (``history``, ``donor``). Why so: ``docs/design/catching-up.md``.
"""
