"""Classify hosts and IP addresses: what only this machine can reach, and what is internal."""

from __future__ import annotations

import ipaddress

# IPv6 prefix whose last 32 bits are an IPv4 address that it leads to: NAT64 (RFC 6052).
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

_LOOPBACK_NAMES = ("localhost", "localhost.localdomain")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    if host.lower() in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_address(name: str) -> bool:
    """Return whether `name` is an IP address. DNS rebinding can't change an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def address_kind(address: str) -> str:
    """Return "public", "loopback", "link-local", "private" or "reserved" for an IPv4 or IPv6
    address. A URL from a client or a web page must not reach internal addresses.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip in _NAT64:
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        elif ip.sixtofour is not None:
            ip = ip.sixtofour
    if ip.is_loopback or ip.is_unspecified:  # connecting to 0.0.0.0 or :: reaches this machine
        return "loopback"
    if ip.is_link_local:
        return "link-local"
    if ip.is_multicast or ip.is_reserved:
        return "reserved"
    if ip.is_global:
        return "public"
    return "private"
