"""Which network an IP address lies in: what is fetched on somebody's word must not lead into this
machine's own."""

from __future__ import annotations

import ipaddress

# IPv6 addresses that carry an IPv4 one in their last 32 bits and lead to it: NAT64 (RFC 6052).
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def address_kind(address: str) -> str:
    """public, loopback, link-local, private or reserved: which network an IP address (v4 or v6)
    lies in."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip in _NAT64:
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        elif ip.sixtofour is not None:
            ip = ip.sixtofour
    if ip.is_loopback or ip.is_unspecified:  # a connection to 0.0.0.0 or :: reaches this machine
        return "loopback"
    if ip.is_link_local:
        return "link-local"
    if ip.is_multicast or ip.is_reserved:
        return "reserved"
    if ip.is_global:
        return "public"
    return "private"
