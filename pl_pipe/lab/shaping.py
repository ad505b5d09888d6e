"""How `tc` is told what a link is like. link -> *tc commands* -> namespaces.

A rate is a token bucket. It is capped on both ends: what a host sends on its own interface, what it receives on the
switch's port to it. Latency and loss are netem's, inside the bucket, half of them on each end.

    host ─ eth0 [tbf [netem]] ════ port ─ switch          sending
    host ─ eth0 ════ [tbf [netem]] port ─ switch          receiving
"""

from pl_pipe.cluster.link_text import format_delay, format_loss
from pl_pipe.cluster.rehearsed import Link

_LEAST_BUCKET_BYTES = 1 << 17
"""The kernel hands over up to 64 kB at once; a smaller bucket would take each of them apart."""
_CATCH_UP_S = 0.01
_CATCH_UP_FACTOR = 1.15
_AT_ONCE_S = 0.002
"""On a busy machine the kernel's timers come late; a bucket that has run over by then caps the link lower than told. So
a link may make up for a hundredth of a second, though at most 15 % faster than its rate, lest whole messages pass
at once on a link that was idle; only two thousandths may."""
_QUEUE_S = 0.01
_LEAST_QUEUE_BYTES = 1 << 20
_QUEUED_PACKETS = 100_000


def commands(link: Link, *, device: str, before: Link | None = None, whole: bool = False) -> list[str]:
    """Lines for `tc -batch`; `before` is what the device has now. A link's end has half of what disturbs it.

    Of a device that is no link's end but all of it (`whole`), everything is on this one.
    """
    lines = []
    if before is not None and _kind(before) != _kind(link) and _kind(before) != (False, False):
        lines.append(cleared(device))
    if link.rate is not None:
        bytes_per_s = link.rate / 8
        bucket = max(_LEAST_BUCKET_BYTES, int(bytes_per_s * _CATCH_UP_S))
        at_once = max(_LEAST_BUCKET_BYTES, int(bytes_per_s * _AT_ONCE_S))
        queue = max(_LEAST_QUEUE_BYTES, int(bytes_per_s * (_QUEUE_S + 2 * link.latency_s)))
        lines.append(
            f"qdisc replace dev {device} root handle 1: tbf rate {link.rate:.0f}bit burst {bucket} limit {queue} "
            f"peakrate {link.rate * _CATCH_UP_FACTOR:.0f}bit mtu {at_once}"
        )
    if link.disturbed:
        share = 1.0 if whole else 0.5
        parent = "root" if link.rate is None else "parent 1:1"
        words = [f"qdisc replace dev {device} {parent} handle 10: netem limit {_QUEUED_PACKETS}"]
        if link.latency_s:
            words.append(f"delay {format_delay(link.latency_s * share)}")
        if link.loss:
            words.append(f"loss {format_loss(link.loss * share)}")
        lines.append(" ".join(words))
    return lines


def cleared(device: str) -> str:
    """The line that takes all queues away."""
    return f"qdisc del dev {device} root"


def _kind(link: Link) -> tuple[bool, bool]:
    """Which queues a link has: within one kind they are changed in place, and nothing that waits in them is lost."""
    return link.rate is not None, link.disturbed
