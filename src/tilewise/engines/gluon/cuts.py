"""The constants of the Hopper kernels, as plain data: nothing here needs Triton."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardCut:
    d: int  # head dims in shared memory, zeros past the tensors' own
    dv: int
    block_n: int  # keys of a step
    warpgroups: int  # consumers: a query tile has 64 rows for each
    k_stages: int
    v_stages: int  # three and more: V is awaited a step ahead, under the softmax
    ping_pong: bool  # consumers take turns at issuing products
    own_o_buffer: bool  # O leaves through its own shared memory, so that the next Q can load at once

    @property
    def q_free(self) -> int:
        """The named barrier by which Q is handed back: one that turns (5 and up, one a warpgroup) and stages of K (8 and up) leave."""
        assert self.warpgroups == 2 or self.k_stages < 4
        return 7 if self.warpgroups == 2 else 11

    @property
    def registers(self) -> tuple[int, int]:
        """Of a consumer's and of the producer's threads."""
        return (240, 24) if self.warpgroups == 2 else (160, 32)


@dataclass(frozen=True)
class BackwardCut:
    d: int  # head dim in shared memory, of keys and values alike: 64, 128 or 256
    stages: int  # query tiles in flight

    @property
    def wide(self) -> bool:
        """A warpgroup has dV or dK of all keys of a program, instead of both of half of them."""
        return self.d > 128

    @property
    def block_m(self) -> int:
        """Queries of a step. A warpgroup computes half of dQ's rows (D = 64), or half of its columns."""
        return 128 if self.d == 64 else 64

    @property
    def block_n(self) -> int:
        """Keys of a program."""
        return 64 if self.wide else 128

    @property
    def dq_columns(self) -> int:
        """Of dQ that a warpgroup computes: 64 of its rows at a time."""
        return 128 if self.wide else 64

    @property
    def returning(self) -> int:
        """Threads that hand a stage of queries back: the store warp's if dQ leaves through it, otherwise the consumers'."""
        return 32 if self.wide else 256
