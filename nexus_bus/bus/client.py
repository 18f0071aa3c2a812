"""nats-py with the faults mended that would silently stop a worker. The only file that reaches into the client.

Reproduced with nats-py 2.16.0; each guard has its test in tests/bus/test_faults.py.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# The client's own attributes are half typed.

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error


class GuardedClient(Client):
    """A client whose read loop and reconnecting survive what the stock one's do not."""

    async def _process_pong(self) -> None:
        """A PONG that comes after its `flush()` gave up found a done future, raised, and killed the read loop (as #914)."""
        if self._pongs:
            future: asyncio.Future[bool] = self._pongs.pop(0)
            self._pongs_received += 1
            self._pings_outstanding = 0
            if not future.done():
                future.set_result(True)

    async def _process_err(self, err_msg: str) -> None:
        """After most `-ERR` the stock client closes for ever (#1019, #999); what caused it passes, so we come back instead."""
        if "permissions violation" in err_msg.lower():
            await super()._process_err(err_msg)  # concerns one subject, not the connection
        else:
            await self._process_op_err(Error(f"nats: {err_msg}"))

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Whoever sits between could answer for the server that it needs no encryption, and the stock client goes on in the
        clear, whatever the address says. Nor does it hear of the account's own limit, which comes once the server knows who
        connects: a larger message costs the connection, and whoever waits for its answer waits in vain.
        """
        if initial_connection and "tls" in self.options and not info.get("tls_required"):
            raise Error("the address says tls://, and the server does not encrypt; use nats:// only where nobody listens in")
        await super()._process_info(info, initial_connection)
        if not initial_connection and "max_payload" in info:
            self._max_payload = info["max_payload"]

    async def _process_headers(self, headers: Any) -> dict[str, str] | None:
        """A status line that is no text raised, and killed the read loop: any tenant could have cut the gateway off."""
        try:
            return await super()._process_headers(headers)
        except (ValueError, IndexError):  # of what nobody can read, nothing is read
            return None

    async def _attempt_reconnect(self) -> None:
        """The stock client first waits for its unsent bytes to leave, which they never do to a server that hangs."""
        writer: Any = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        await super()._attempt_reconnect()

    async def _flush_pending(self, force_flush: bool = False) -> None:
        """The stock client swallows a cancellation that arrives here, and the task that was cancelled lives on. It also wakes a
        task for each message that is to leave; where nothing else waits for the socket, it leaves at once.
        """
        out: Any = getattr(getattr(self._transport, "_io_writer", None), "transport", None)
        if out is not None and self.is_connected and not (force_flush or out.is_closing() or out.get_write_buffer_size()):
            out.writelines(self._pending)
            self._pending, self._pending_data_size = [], 0
            return
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        await super()._flush_pending(force_flush)
        if task and task.cancelling() > before:
            raise asyncio.CancelledError

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        """The stock client raises where the server cut it off with bytes unsent; they are lost, and it closes all the same.

        Where it is just coming back, it cancels that, and with it what it itself is about to wait for: the end of the socket.
        """
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        try:
            await super()._close(status, do_cbs)
        except OSError:
            self._status = Client.DISCONNECTED
            await super()._close(status, do_cbs)
        except asyncio.CancelledError:
            if task and task.cancelling() > before:
                raise
            self._status, self._transport = Client.DISCONNECTED, None
            await super()._close(status, do_cbs)

    async def ask(self, on: str, payload: bytes, headers: dict[str, str]) -> "asyncio.Future[Msg]":
        """Ask, and leave the waiting to the caller: the future of its answer, of status 503 where nobody serves `on`."""
        if not self._resp_sub_prefix:
            await self._init_request_sub()
        token = self._nuid.next().decode()
        prefix: Any = self._resp_sub_prefix
        asked: dict[str, asyncio.Future[Msg]] = self._resp_map
        answer = asked[token] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda _: asked.pop(token, None))
        try:
            await self.publish(on, payload, reply=prefix.decode() + token, headers=headers)
        except BaseException:
            answer.cancel()
            raise
        return answer

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        """The stock client queues an answer and wakes a task that hands it to whoever waits; here it is handed on at once."""
        prefix: Any = self._resp_sub_prefix
        answer = self._resp_map.get(subject[len(prefix) :].decode()) if prefix and subject.startswith(prefix) else None
        if answer is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        msg = self._build_message(sid, subject, reply, data, await self._process_headers(headers))
        if not answer.done():
            answer.set_result(msg)

    async def take(self, on: str, callback: Callable[[Msg], Awaitable[None]], queue: str = "") -> Any:
        """Subscribe without limits: with the stock ones a slow reader loses messages silently (134 of 200)."""
        subscribe: Any = self.subscribe
        return await subscribe(on, queue=queue, cb=callback, pending_msgs_limit=0, pending_bytes_limit=0)

    @property
    def alive(self) -> bool:
        """Connected, and somebody reads: `is_connected` alone stays true when the read loop is dead."""
        task: asyncio.Task[Any] | None = self._reading_task
        return self.is_connected and task is not None and not task.done()

    async def revive(self) -> None:
        """Start over where the client believes itself connected, or reconnecting, and nothing of it runs."""
        if self.is_connected and not self.alive:
            await self._process_op_err(Error("nats: the read loop ended"))
        elif self.is_reconnecting and (self._reconnection_task is None or self._reconnection_task.done()):
            self._reconnection_task = asyncio.get_running_loop().create_task(self._attempt_reconnect())
