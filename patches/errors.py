"""The one error type of the queue: its message is the user interface, no traceback is shown."""


class QueueError(Exception):
    """Something in the queue, the release or the request does not fit; the message says what and what to do."""
