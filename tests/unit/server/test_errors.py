from __future__ import annotations

from octavo.core.errors import EngineDeadError, QueueFullError, RequestError
from octavo.server.errors import SERVER_ERROR, error_body, error_response, sanitized, server_error


def test_body_has_openais_shape() -> None:
    error = RequestError("top_p must be in (0, 1]", param="top_p")
    assert error_body(error) == {
        "error": {
            "message": "top_p must be in (0, 1]",
            "type": "BadRequestError",
            "param": "top_p",
            "code": 400,
        }
    }


def test_a_full_queue_may_be_tried_again() -> None:
    response = error_response(QueueFullError("busy"))
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"


def test_unexpected_errors_tell_nothing() -> None:
    known = server_error(ValueError("/secret/path"))
    assert (known.message, known.status) == (SERVER_ERROR, 500)


def test_why_the_engine_is_dead_is_told_without_addresses() -> None:
    known = server_error(EngineDeadError("worker 1 has failed (cuda at 0xdeadbeef)"))
    assert known.message == f"{SERVER_ERROR} (worker 1 has failed (cuda at ...))"
    assert known.status == 500


def test_sanitized_messages_have_no_paths_or_addresses() -> None:
    message = "RuntimeError at /usr/lib/x.py: object <T 0x7f00ab> in C:\\temp\\m.bin\nTraceback ..."
    assert sanitized(message) == "RuntimeError at ...: object <T ...> in ..."
    assert sanitized("the model gave non-finite logits") == "the model gave non-finite logits"
    assert len(sanitized("x" * 1000)) == 200
