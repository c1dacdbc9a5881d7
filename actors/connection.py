"""Opening the two ends of the driver–worker link: in clear, or under mutual TLS when the link's settings name files.

Under TLS either end shows the service's certificate and accepts only one that the service's authority has signed. The
secret is asked for beside it.
"""

from pathlib import Path

import grpc

from microtome.actors.link import LinkSettings
from microtome.planner.errors import BadConfig


def open_channel(address: str, link: LinkSettings) -> grpc.aio.Channel:
    """A channel of its own connection. Raises `BadConfig` for a file that cannot be read."""
    if not link.tls:
        return grpc.aio.insecure_channel(address, options=link.channel_options)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read("tls_authority", link.tls_authority),
        private_key=_read("tls_key", link.tls_key),
        certificate_chain=_read("tls_certificate", link.tls_certificate),
    )
    # Workers are reached by their nodes' addresses, which no certificate of a service that scales can list.
    options = (*link.channel_options, ("grpc.ssl_target_name_override", link.tls_name))
    return grpc.aio.secure_channel(address, credentials, options=options)


def bind(server: grpc.aio.Server, host: str, link: LinkSettings) -> str:
    """Bind to any free port of `host`, an address; the result is "host:port". Raises `BadConfig`."""
    name = f"[{host}]" if ":" in host else host
    try:
        if link.tls:
            key, certificate = _read("tls_key", link.tls_key), _read("tls_certificate", link.tls_certificate)
            credentials = grpc.ssl_server_credentials(
                [(key, certificate)],
                root_certificates=_read("tls_authority", link.tls_authority),
                require_client_auth=True,
            )
            port = server.add_secure_port(f"{name}:0", credentials)
        else:
            port = server.add_insecure_port(f"{name}:0")
    except RuntimeError as error:
        raise BadConfig(f"cannot bind to {host}: {error}") from error
    return f"{name}:{port}"


def _read(setting: str, path: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise BadConfig(f"{setting} {path!r} cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in content:
        raise BadConfig(f"{setting} {path!r} is not a PEM file")
    return content
