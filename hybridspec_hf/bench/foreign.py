"""Published GDN kernels behind the benchmark's interface: SGLang 0.5.23's two verifiers and fla 0.6.0's recurrence.

Optional: a class imports its package when it is built, and no other module knows those packages. The kernels are
called as their own engine calls them for one request with a linear draft, with its default launch parameters.
"""

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hybridspec_generation.gdn import GDNParams, GDNShape


class ForeignGDN:
    """What the adapters share; arguments as in `ComparedGDN`, but `overlap` is their engine's choice."""

    def __init__(self, shape: GDNShape, block: int) -> None:
        self.shape, self.block = shape, block
        L, C, taps = shape.layers, shape.channels, shape.taps
        options: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
        # [L, slots, ...]: the one request is slot 0
        self.state = torch.zeros(
            L, 1, shape.value_heads, shape.value_dim, shape.key_dim, dtype=torch.float32, device=shape.device
        )
        self.window = torch.zeros(L, 1, C, taps - 1, **options)
        self.rows = torch.zeros(L, block, C, **options)
        self.slot = torch.zeros(1, dtype=torch.int32, device=shape.device)
        ends = torch.arange(block + 1, dtype=torch.int32, device=shape.device)
        # row w is the packed sequence boundaries [0, w]
        self.boundaries = torch.stack([torch.zeros_like(ends), ends], dim=1)
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}

    def load(self, layer: int, window: Tensor, state: Tensor) -> None:
        self.window[layer, 0] = window.t()
        self.state[layer, 0] = state

    def inputs(self, layer: int, w: int) -> Tensor:
        return self.rows[layer, :w]

    def states(self) -> Tensor:
        return self.state[:, 0]

    def windows(self) -> Tensor:
        return self.window[:, 0].transpose(1, 2)

    def conv_weight(self, layer: int, params: GDNParams) -> Tensor:
        """`[C, taps]`, contiguous, made once for a layer's parameters."""
        source = params.conv_weight
        if layer not in self._weights or self._weights[layer][0] is not source:
            self._weights[layer] = source, source.t().contiguous()
        return self._weights[layer][1]

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[w, C]` -> strided views q, k `[1, w, H, K]` and v `[1, w, HV, V]`."""
        s = self.shape
        width = s.key_heads * s.key_dim
        q, k, v = x[None].split([width, width, s.value_heads * s.value_dim], dim=-1)
        heads = (s.key_heads, s.key_dim)
        return q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, (s.value_heads, s.value_dim))


class _SGLangConvGDN(ForeignGDN):
    """The convolution of SGLang's verifiers: it keeps the window after every token."""

    def __init__(self, shape: GDNShape, block: int) -> None:
        super().__init__(shape, block)
        from sglang.kernels.ops.mamba import mamba_state_scatter_triton
        from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

        self.scatter, self.convolve = mamba_state_scatter_triton, causal_conv1d_update
        L, C, wide = shape.layers, shape.channels, block + shape.taps - 2
        self.window_rows = torch.zeros(L, 1, C, wide, dtype=shape.dtype, device=shape.device)
        # [L, 1, W, C, taps-1]: token t's window is columns t .. t+taps-2 of the same rows
        self.token_windows = self.window_rows.as_strided(
            (L, 1, block, C, shape.taps - 1), (C * wide, C * wide, 1, wide, 1)
        )
        self.step = torch.zeros(1, dtype=torch.int32, device=shape.device)

    def verify(self, layer: int, w: int, a: Tensor, b: Tensor, params: GDNParams, overlap: bool = False) -> Tensor:
        x = self.convolve(
            self.rows[layer, :w][None].transpose(1, 2),
            self.window[layer],
            self.conv_weight(layer, params),
            None,
            "silu",
            conv_state_indices=self.slot,
            intermediate_conv_window=self.token_windows[layer],
            intermediate_state_indices=self.slot,
        )
        return self.verify_convolved(layer, x.transpose(1, 2)[0], a, b, params)

    def verify_convolved(
        self, layer: int, x: Tensor, a: Tensor, b: Tensor, params: GDNParams, overlap: bool = False
    ) -> Tensor:
        raise NotImplementedError


class SGLangGDN(_SGLangConvGDN):
    """SGLang's default: token by token, the state after every token stored, the accepted one copied."""

    uneven_commits: ClassVar[bool] = False

    def __init__(self, shape: GDNShape, block: int) -> None:
        super().__init__(shape, block)
        from sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent import (
            fused_sigmoid_gating_delta_rule_update,
        )

        self.recur = fused_sigmoid_gating_delta_rule_update
        self.token_states = self.state.new_zeros(shape.layers, 1, block, *self.state.shape[2:])

    def verify_convolved(
        self, layer: int, x: Tensor, a: Tensor, b: Tensor, params: GDNParams, overlap: bool = False
    ) -> Tensor:
        q, k, v = self.split(x)
        out = self.recur(
            A_log=params.A_log,
            a=a,
            dt_bias=params.dt_bias,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=q,
            k=k,
            v=v,
            b=b,
            initial_state_source=self.state[layer],
            initial_state_indices=self.slot,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=self.boundaries[len(x)],
            disable_state_update=True,
            intermediate_states_buffer=self.token_states[layer],
            intermediate_state_indices=self.slot,
            cache_steps=self.block,
        )
        return out[0]

    def commit(self, num_committed: Tensor, windows: bool = True, overlap: bool = False) -> None:
        # one small kernel, as SGLang's own that finds the last accepted step
        torch.sub(num_committed, 1, out=self.step)
        if not windows:
            self.scatter.fused_mamba_state_scatter_with_mask(self.state, self.token_states, self.slot, self.step)
            return
        caches = SimpleNamespace(
            temporal=self.state,
            intermediate_ssm=self.token_states,
            conv=[self.window],
            intermediate_conv_window=[self.token_windows],
        )
        self.scatter.scatter_mamba_states_after_mtp_verify(caches, self.slot, self.step, None, None)
        # SGLang drops its pointer table when another one is asked for, and a captured graph still reads it
        self.pointers = dict(self.scatter._conv_multi_meta_cache)

    def verification_bytes(self) -> int:
        return self.token_states.nbytes + self.window_rows.nbytes


class ReplaySSMGDN(_SGLangConvGDN):
    """ReplaySSM as SGLang ships it: a ring of updates, folded into the state when the next block may not fit."""

    uneven_commits: ClassVar[bool] = True

    def __init__(self, shape: GDNShape, block: int) -> None:
        super().__init__(shape, block)
        from sglang.kernels.ops.attention.linear import gdn_replayssm_spec_decode

        self.kernels = gdn_replayssm_spec_decode
        L, H, HV = shape.layers, shape.key_heads, shape.value_heads
        R = max(16, 1 << (2 * block - 1).bit_length())
        self.z, self.z_low = (self.window.new_zeros(L, 1, HV, R, shape.value_dim) for _ in range(2))
        self.k, self.k_low = (self.window.new_zeros(L, 1, H, R, shape.key_dim) for _ in range(2))
        self.log_decay = self.state.new_zeros(L, 1, HV, R)
        self.count, self.base = torch.zeros_like(self.slot), torch.zeros_like(self.slot)
        self.full = torch.zeros(1, dtype=torch.int8, device=shape.device)

    def load(self, layer: int, window: Tensor, state: Tensor) -> None:
        super().load(layer, window, state)
        for cursor in (self.count, self.base, self.full):
            cursor.zero_()

    def verify_convolved(
        self, layer: int, x: Tensor, a: Tensor, b: Tensor, params: GDNParams, overlap: bool = False
    ) -> Tensor:
        q, k, v = (part[0] for part in self.split(x))
        return self.kernels.gdn_replayssm_spec_decode(
            q=q,
            k=k,
            v=v,
            a=a,
            b=b,
            A_log=params.A_log,
            dt_bias=params.dt_bias,
            checkpoint_state=self.state[layer],
            d_cache=self.z[layer],
            k_cache=self.k[layer],
            g_cache=self.log_decay[layer],
            rawv_cache=self.z_low[layer],
            rawk_cache=self.k_low[layer],
            beta_cache=None,
            out=torch.empty_like(v, memory_format=torch.contiguous_format),
            query_start_loc=self.boundaries[len(x)],
            ssm_state_indices=self.slot,
            replay_indices=self.slot,
            write_pos=self.count,
            cache_base=self.base,
            is_flush=self.full,
            max_cache_len=self.z.shape[-2],
            max_spec_len=self.block,
            scale=self.shape.key_dim**-0.5,
            use_qk_l2norm_in_kernel=True,
            null_block_id=-1,
            launch_mode="verify",
        )

    def commit(self, num_committed: Tensor, windows: bool = True, overlap: bool = False) -> None:
        cursors: dict[str, Any] = {
            "write_pos": self.count,
            "cache_base": self.base,
            "is_flush": self.full,
            "replay_indices": self.slot,
            "null_block_id": -1,
        }
        self.kernels.commit_gdn_replayssm_spec(
            **cursors, num_accepted=num_committed, max_cache_len=self.z.shape[-2], max_spec_len=self.block
        )
        self.kernels.commit_gdn_replayssm_circular(
            **cursors,
            checkpoint_state=self.state,
            d_cache=self.z,
            k_cache=self.k,
            g_cache=self.log_decay,
            d_residual_cache=self.z_low,
            k_residual_cache=self.k_low,
            state_batch_indices=self.slot,
            accept_lens=num_committed,
        )
        if windows:
            torch.sub(num_committed, 1, out=self.step)
            self.scatter.fused_conv_window_scatter_with_mask(self.window, self.token_windows, self.slot, self.step)

    def states(self) -> Tensor:
        """The ring's live entries folded into a copy."""
        R = self.z.shape[-2]
        entries = (self.base + torch.arange(R, device=self.slot.device)) % R
        live = torch.arange(R, device=self.slot.device) < self.count
        g = torch.where(live, self.log_decay[:, 0, :, entries], 0.0)
        weight = torch.where(live, (g.sum(-1, keepdim=True) - g.cumsum(-1)).exp(), 0.0)
        z = (self.z.float() + self.z_low.float())[:, 0, :, entries] * weight[..., None]
        k = (self.k.float() + self.k_low.float())[:, 0, :, entries]
        k = k.repeat_interleave(z.shape[1] // k.shape[1], dim=1)
        return g.sum(-1).exp()[..., None, None] * self.state[:, 0] + z.transpose(-1, -2) @ k

    def verification_bytes(self) -> int:
        rings = (self.z, self.z_low, self.k, self.k_low, self.log_decay)
        return sum(ring.nbytes for ring in rings) + self.window_rows.nbytes


class FlaGDN(ForeignGDN):
    """flash-linear-attention's recurrence with the gates in the kernel; the commit runs it again on the m tokens.

    It has no convolution, and copies the strided q, k and v itself.
    """

    uneven_commits: ClassVar[bool] = False

    def __init__(self, shape: GDNShape, block: int) -> None:
        super().__init__(shape, block)
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

        self.recur = fused_recurrent_gated_delta_rule
        self.calls: dict[int, dict[str, Any]] = {}
        self.committed = torch.zeros(2, dtype=torch.int64, device=shape.device)

    def verify(self, layer: int, w: int, a: Tensor, b: Tensor, params: GDNParams, overlap: bool = False) -> Tensor:
        raise NotImplementedError("flash-linear-attention's recurrence has no convolution: compare it in scope core.")

    def verify_convolved(
        self, layer: int, x: Tensor, a: Tensor, b: Tensor, params: GDNParams, overlap: bool = False
    ) -> Tensor:
        q, k, v = self.split(x)
        self.calls[layer] = {
            "q": q,
            "k": k,
            "v": v,
            "g": a[None],
            "beta": b[None],
            "A_log": params.A_log,
            "dt_bias": params.dt_bias,
            "initial_state": self.state[layer],
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "state_v_first": True,
        }
        return self.recur(**self.calls[layer])[0][0]

    def commit(self, num_committed: Tensor, windows: bool = True, overlap: bool = False) -> None:
        self.committed[1:].copy_(num_committed)
        for layer, call in self.calls.items():
            _, state = self.recur(**call, output_final_state=True, cu_seqlens=self.committed)
            self.state[layer].copy_(state)

    def verification_bytes(self) -> int:
        return 0
