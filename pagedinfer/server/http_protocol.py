"""uvicorn's HTTP protocol, with a limit on the size of headers, which it has none of its own for."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pagedinfer.server.api_errors import ApiError


def limited_protocol(max_header_bytes: int) -> type[HttpToolsProtocol]:
    """A protocol class that answers 431 to longer headers, and closes the connection."""

    class LimitedProtocol(HttpToolsProtocol):
        _in_headers = True
        _header_bytes = 0

        def data_received(self, data: bytes) -> None:
            # Counted before they are parsed: a header's name or value may be all of it.
            if self._in_headers:
                self._header_bytes += len(data)
                if self._header_bytes > max_header_bytes and b"\r\n\r\n" not in data[:max_header_bytes]:
                    self._refuse()
                    return
            if not self.transport.is_closing():
                super().data_received(data)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_headers = True

        def on_headers_complete(self) -> None:
            self._in_headers = False
            self._header_bytes = 0
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._in_headers = True

        def _refuse(self) -> None:
            error = ApiError(431, f"the headers are larger than {max_header_bytes} bytes")
            body = error.body()
            head = (
                "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self.transport.close()

    return LimitedProtocol
