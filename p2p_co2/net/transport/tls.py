"""A certificate for this process, and the certificate that another process shows.

A certificate authenticates nobody by itself: it is self-signed, made anew at every start, and its private key
never leaves memory. What counts is its digest, in the owner's signed ``PeerRecord``: the dialler compares,
then trusts exactly this certificate and no authority (pinning, RFC 7858 section 4.2 in spirit). Price: one
extra handshake per new server, to learn its certificate.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import os
import ssl
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from p2p_co2.errors import TransportError

TARGET_NAME = "peer.p2p-co2.invalid"
"""The name inside every certificate (RFC 2606 top-level domain): TLS wants one, and ours means nothing."""
_MARGIN = datetime.timedelta(days=30)
"""Volunteers' clocks are wrong; the signed record's expiry bounds the use of a certificate, not this."""
_LIFETIME = datetime.timedelta(days=3650)


@dataclass(frozen=True)
class ServerCertificate:
    """``key_pem`` is secret. ``digest`` is sha256 of the DER certificate, 32 bytes."""

    key_pem: bytes
    certificate_pem: bytes
    digest: bytes

    def __repr__(self) -> str:
        return f"ServerCertificate({self.digest.hex()})"


def make_certificate(now: float) -> ServerCertificate:
    """A new key and its self-signed certificate; ``now`` in unix seconds."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, TARGET_NAME)])
    at = datetime.datetime.fromtimestamp(now, datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(at - _MARGIN)
        .not_valid_after(at + _LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(TARGET_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return ServerCertificate(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        certificate.public_bytes(serialization.Encoding.PEM),
        hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest(),
    )


async def fetch_certificate(host: str, port: int, digest: bytes, timeout_s: float) -> bytes:
    """The certificate (PEM) shown at ``host:port`` if it has this digest.

    Raises ``TransportError``: nobody there, no TLS there, or another certificate (the peer restarted and its
    record is old, or somebody else answers). Safe to cancel.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the digest below is the verification
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=TARGET_NAME)
    except TimeoutError:
        raise TransportError(f"{host}:{port} did not answer within {timeout_s:.0f} s") from None
    except ssl.SSLError as error:
        raise TransportError(f"{host}:{port} does not speak TLS as we do: {error.reason}") from None
    except OSError as error:
        number = error.errno or 0  # asyncio and the resolver put other words into strerror
        raise TransportError(f"{host}:{port}: {os.strerror(number) if number > 0 else error}") from None
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()  # nothing was said, so nothing needs an orderly end
    if hashlib.sha256(shown).digest() != digest:
        raise TransportError(
            f"{host}:{port} shows another certificate than the peer's record names; the peer restarted, or "
            "somebody else answers there"
        )
    return ssl.DER_cert_to_PEM_cert(shown).encode()
