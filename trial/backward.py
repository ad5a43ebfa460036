"""Attention backward for Hopper in CUDA C++ (backward.cu), a trial: bf16, head dim 128, MHA, full and causal.

    python backward.py build [FOLDER]     compile all variants, no GPU: registers, spills, warnings, order of instructions (cubins into FOLDER)
    python backward.py check [NAMES]      on an H200: every variant in a process of its own, against float32 (debug build first, then the real one)
    python backward.py time [NAMES]       those that were right, beside tilewise's Gluon backward and cuDNN; --all: also those not checked

NAMES: of variants, separated by commas.
"""
import concurrent.futures
import ctypes
import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "backward.cu"
SRC = next((p / "src" for p in HERE.parents if (p / "src" / "tilewise").is_dir()), HERE)
STATE = Path(tempfile.gettempdir()) / f"bwd_trial_{os.getuid()}"       # cubins, and what check found
ADD_MODES = {"none": 0, "bulk": 1, "red": 2, "store": 3, "local": 4}
SHARED_LIMIT = 232448
DEVICE, LENGTHS = "cuda", (2048, 8192, 16384)
SIZES = {True: ((1, 1, 128), (1, 2, 256), (2, 3, 512), (1, 5, 1024), (1, 3, 1000), (2, 2, 1100)),      # batch, heads, tokens: by debug build or not
         False: ((1, 3, 256), (2, 3, 512), (2, 5, 1024), (2, 8, 2048), (1, 3, 1100))}
PLACES = ["?", "load: stage empty", "store: dQ staged", "store: partner's dQ has come", "consumer: K", "consumer: V", "consumer: Q", "consumer: dO",
          "consumer: staging is free", "consumer: partner's buffer is free"]


@dataclasses.dataclass(frozen=True)
class Variant:
    bm: int = 80                     # queries a step
    cluster: int = 1                 # 2: dQ of two key tiles is summed before it is added to memory
    multicast: bool = False          # clusters: Q and dO are loaded once for both
    adds: str = "bulk"               # bulk: cp.reduce.async.bulk; red: red.global.add.v4.f32; store, local, none: wrong dQ, for timing (backward.cu)
    slots: int = 1                   # staging buffers of dQ
    right: bool = True               # dQ is what it should be

    @property
    def shared(self):
        tile = self.bm * 256
        own = self.bm * 512 // self.cluster
        return 1024 + 65536 + 6 * tile + self.slots * own + (own if self.cluster == 2 else 0) + 4 * self.bm * 4 + 160


VARIANTS = {
    "A80": Variant(),
    "A64": Variant(bm=64, slots=2),
    "B80 red": Variant(cluster=2, adds="red"),
    "B80 bulk": Variant(cluster=2),
    "B80 red multi": Variant(cluster=2, adds="red", multicast=True),
    "B80 bulk multi": Variant(cluster=2, multicast=True),
    "B64 red": Variant(bm=64, cluster=2, adds="red", slots=2),
    "A80 red": Variant(adds="red"),
    "A80 stores": Variant(adds="store", right=False),
    "A80 local": Variant(adds="local", right=False),
    "A80 none": Variant(adds="none", right=False),
    "B80 none": Variant(cluster=2, adds="none", right=False),
}


# ---- source, compiler --------------------------------------------------------------------------------------------------
def mma(name, n, a):
    """A function around wgmma m64 x n x k16. a: "rows" (shared memory, k contiguous, B likewise), "columns" (m contiguous), "registers" (B is k x n as it lies)."""
    r = n // 2
    sums = ", ".join(f"%{i}" for i in range(r))
    outs = ", ".join(f'"+f"(d[{i}])' for i in range(r))
    if a == "registers":
        text, kind, ins, b, flags = "{" + ", ".join(f"%{r + i}" for i in range(4)) + "}", "const u32* a", ", ".join(f'"r"(a[{i}])' for i in range(4)), r + 4, "p, 1, 1, 1"
    else:
        text, kind, ins, b, flags = f"%{r}", "u64 a", '"l"(a)', r + 1, f"p, 1, 1, {int(a == 'columns')}, 0"
    return (f"__device__ __forceinline__ void {name}(float (&d)[{r}], {kind}, u64 b, bool add) {{\n"
            f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{b + 1}, 0;\\n'
            f'wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{sums}}}, {text}, %{b}, {flags};\\n}}"\n'
            f'        : {outs} : {ins}, "l"(b), "r"((int)add));\n}}\n')


def source(v, causal, debug):
    macros = dict(BM=v.bm, CAUSAL=int(causal), CLUSTER=v.cluster, MULTICAST=int(v.multicast), ADDS=ADD_MODES[v.adds], SLOTS=v.slots, DEBUG_SPIN=int(debug))
    return ("typedef unsigned int u32;\ntypedef unsigned long long u64;\n" + "".join(f"#define {k} {x}\n" for k, x in macros.items())
            + mma("s_mma", v.bm, "rows") + mma("dq_mma", v.bm, "columns") + mma("kv_mma", 128, "registers") + f'#line 1 "backward.cu"\n' + SOURCE.read_text()
            + "\nstatic_assert(Shared::end + 1024 == %d, \"shared memory\");\n" % v.shared)


def nvrtc():
    spec = importlib.util.spec_from_file_location("nvrtc", SRC / "tilewise" / "engines" / "cuda" / "nvrtc.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled(job):
    """Cubin and log of (variant, causal, debug), from the folder of cubins if it is there."""
    v, causal, debug = job
    text = source(v, causal, debug)
    path = STATE / (hashlib.sha256(text.encode()).hexdigest()[:24] + ".json")
    if path.exists():
        found = json.loads(path.read_text())
        return bytes.fromhex(found["cubin"]), found["log"], found["seconds"]
    begin = time.perf_counter()
    cubin, log = nvrtc().compiled(text, "backward.cu")
    seconds = time.perf_counter() - begin
    STATE.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"cubin": cubin.hex(), "log": log, "seconds": seconds}))
    part.rename(path)
    return cubin, log, seconds


def compile_all(jobs):
    nvrtc()                                                                # imports torch once: processes are forked
    with concurrent.futures.ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool:
        return list(pool.map(compiled, jobs))


# ---- reading SASS ------------------------------------------------------------------------------------------------------
def tool(name):
    import triton
    return os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)


def build(names, folder):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(n, c, d) for n in names for c in (False, True) for d in (False, True)]
    for (name, causal, debug) in jobs:
        v = VARIANTS[name]
        cubin, log, seconds = compiled((v, causal, debug))
        path = folder / f"{name.replace(' ', '_')}_{'causal' if causal else 'full'}{'_debug' if debug else ''}.cubin"
        path.write_bytes(cubin)
        part = log[log.find("'backward'"):] if "'backward'" in log else log
        spill = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers", part)
        warned = sorted(set(re.findall(r"C7\d\d\d[^\n]*", log)))
        print(f"{path.stem:28s} {seconds:4.1f} s, shared {v.shared}{' TOO MUCH' if v.shared > SHARED_LIMIT else ''}, {used.group(0) if used else '?'}, "
              f"stack/spill {spill.groups() if spill else '?'} {warned or ''}", flush=True)
        other = [line for line in log.splitlines() if "warning" in line.lower()]
        if other:
            print("   ", *other, sep="\n    ")


# ---- driver ------------------------------------------------------------------------------------------------------------
def ok(code, what):
    if code:
        raise RuntimeError(f"{what}: CUDA error {code}")


class Args(ctypes.Structure):
    _fields_ = [("maps", ctypes.c_uint64 * 64), *[(n, ctypes.c_void_p) for n in ("lse2", "delta", "dq", "dk", "dv", "dbg")],
                *[(n, ctypes.c_int) for n in ("S", "heads", "units", "q_tiles", "group")], ("c", ctypes.c_float), ("scale", ctypes.c_float), ("pad", ctypes.c_char * 52)]


assert Args.lse2.offset == 512 and Args.S.offset == 560 and ctypes.sizeof(Args) % 64 == 0


class Kernel:
    def __init__(self, v, causal, debug=False):
        import torch
        torch.zeros(1, device=DEVICE)                                      # the context
        self.v, self.causal, self.debug = v, causal, debug
        cubin, self.log, self.seconds = compiled((v, causal, debug))
        self.cuda = ctypes.CDLL("libcuda.so.1")
        module = ctypes.c_void_p()
        ok(self.cuda.cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
        self.functions = {}
        for name in ("preprocess", "backward", "postprocess"):
            f = ctypes.c_void_p()
            ok(self.cuda.cuModuleGetFunction(ctypes.byref(f), module, name.encode()), name)
            self.functions[name] = f
        ok(self.cuda.cuFuncSetAttribute(self.functions["backward"], 8, v.shared), "shared memory")

    def tensor_map(self, t, rows):
        """(B, H, S, 128) as [1, B H, S, 128]; a box is [rows][64], 128-byte swizzle, zeros past S."""
        b, h, s, d = t.shape
        room = ctypes.create_string_buffer(128 + 64)
        at = (ctypes.addressof(room) + 63) // 64 * 64
        dims = (ctypes.c_uint64 * 4)(d, s, b * h, 1)
        strides = (ctypes.c_uint64 * 3)(d * 2, s * d * 2, b * h * s * d * 2)
        box = (ctypes.c_uint32 * 4)(64, rows, 1, 1)
        ones = (ctypes.c_uint32 * 4)(1, 1, 1, 1)
        ok(self.cuda.cuTensorMapEncodeTiled(ctypes.c_void_p(at), 9, 4, ctypes.c_void_p(t.data_ptr()), dims, strides, box, ones, 0, 3, 3, 0), "cuTensorMapEncodeTiled")
        return ctypes.string_at(at, 128)

    def launch(self, name, grid, threads, shared, values, stream):
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(x) for x in values])
        ok(self.cuda.cuLaunchKernel(self.functions[name], grid, 1, 1, threads, 1, 1, shared, stream, pointers, None), f"launch of {name}")

    def plan(self, q, k, v, out, lse, d_out, group=None):
        """Gradients and a function that fills them (all three launches; run.main: the large one alone)."""
        import torch
        b, h, s, d = q.shape
        c, heads = self.v, b * h
        assert d == 128 and all(t.is_contiguous() and t.dtype == torch.bfloat16 for t in (q, k, v, out, d_out)) and lse.is_contiguous() and lse.dtype == torch.float32
        q_tiles = -(-s // c.bm)
        rows = q_tiles * c.bm
        units = -(-s // (128 * c.cluster))
        group = group or int(os.environ.get("GROUP", 0)) or (max(1, 32768 // s) if self.causal else 1)
        group = max(1, min(group, heads))
        make = lambda *shape: torch.empty(*shape, device=q.device, dtype=torch.float32)
        lse2, delta, sums = make(heads, rows), make(heads, rows), make(heads, rows, 128)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dbg = torch.zeros(8 + 8 * 256, device=q.device, dtype=torch.int32)
        scale = d ** -0.5
        args = Args()
        maps = b"".join((self.tensor_map(q, c.bm), self.tensor_map(k, 128), self.tensor_map(v, 128), self.tensor_map(d_out, c.bm)))
        ctypes.memmove(args.maps, maps, 512)
        for name, t in dict(lse2=lse2, delta=delta, dq=sums, dk=dk, dv=dv, dbg=dbg).items():
            setattr(args, name, t.data_ptr())
        args.S, args.heads, args.units, args.q_tiles, args.group = s, heads, units, q_tiles, group
        args.c, args.scale = scale * math.log2(math.e), scale
        room = ctypes.create_string_buffer(ctypes.sizeof(args) + 64)       # the driver copies it at each launch
        at = (ctypes.addressof(room) + 63) // 64 * 64
        ctypes.memmove(at, ctypes.addressof(args), ctypes.sizeof(args))
        aligned = (ctypes.c_char * ctypes.sizeof(args)).from_address(at)
        pointer = lambda t: ctypes.c_void_p(t.data_ptr())
        before = [pointer(out), pointer(d_out), pointer(lse), pointer(lse2), pointer(delta), pointer(sums), ctypes.c_int(s), ctypes.c_int(rows), ctypes.c_int(heads * rows)]
        after = [pointer(sums), pointer(dq), ctypes.c_int(s), ctypes.c_int(q_tiles), ctypes.c_float(scale)]
        stream = lambda: ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

        def main():
            self.launch("backward", heads * units * c.cluster, 384, c.shared, [aligned], stream())

        def run():
            self.launch("preprocess", -(-heads * rows // 8), 256, 0, before, stream())
            main()
            self.launch("postprocess", heads * q_tiles, 256, 0, after, stream())

        run.main, run.dbg = main, dbg
        run.keep = (q, k, v, out, lse, d_out, lse2, delta, sums, room, args)
        return (dq, dk, dv), run


# ---- check -------------------------------------------------------------------------------------------------------------
def scores_of(q, k, causal):
    import torch
    x = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        s = q.shape[2]
        x = x.masked_fill(torch.ones(s, s, device=q.device, dtype=torch.bool).triu(1), -math.inf)
    return x


def gradients(q, k, v, d_out, causal, dtype):
    import torch
    leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    x = scores_of(*leaves[:2], causal)
    out = x.softmax(-1) @ leaves[2]
    return out.detach(), x.detach().float().logsumexp(-1), [g.float() for g in torch.autograd.grad(out, leaves, d_out.to(dtype))]


def ranges(numbers):
    """0 1 2 5 -> 0-2 5"""
    parts = []
    for n in numbers:
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return " ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in parts)[:200]


def where_wrong(got, want, bm):
    """Blocks of 64 and of bm rows, and of 8 columns, whose error stands out; heads too."""
    import torch
    error = (got - want).abs()
    error = torch.where(error.isfinite(), error, torch.full_like(error, 1e9))
    limit = 0.02 * want.abs().amax().item()
    bad = error > limit
    b, h, s, d = bad.shape
    words = [f"{bad.float().mean().item():.2%} of elements, {(~got.isfinite()).sum().item()} not finite"]
    heads = bad.reshape(b * h, -1).any(1).nonzero().flatten().tolist()
    words.append(f"heads {heads[:16]}")
    for size in sorted({64, bm}):
        padded = torch.nn.functional.pad(bad, (0, 0, 0, -s % size))
        blocks = padded.reshape(b * h, -1, size, d).float().mean((0, 2, 3))
        words.append(f"blocks of {size} rows: " + " ".join(f"{i}:{x:.0%}" for i, x in enumerate(blocks.tolist()) if x > 0)[:200])
    rows = bad.reshape(b * h, s, d).any(-1).any(0).float()
    for size in sorted({64, bm}):
        inside = torch.nn.functional.pad(rows, (0, -s % size)).reshape(-1, size).mean(0)
        words.append(f"rows inside a block of {size}: " + ranges(i for i, x in enumerate(inside.tolist()) if x > 0))
    columns = bad.reshape(-1, d).float().mean(0).reshape(-1, 8).mean(1)
    words.append("columns by 8: " + " ".join(f"{8 * i}:{x:.0%}" for i, x in enumerate(columns.tolist()) if x > 0))
    n = error.flatten().argmax().item()
    words.append(f"worst at {tuple(int(i) for i in torch.unravel_index(torch.tensor(n), error.shape))}: got {got.flatten()[n].item():.4g}, want {want.flatten()[n].item():.4g}")
    ratio = (got * want).sum() / (want * want).sum()
    words.append(f"<got, want> / <want, want> = {ratio.item():.4f} (1 if noise, 0 if unrelated), in all")
    return words


def check_one(name):
    """In a process of its own."""
    import torch
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(1)
    v, good, hints = VARIANTS[name], True, 0
    for debug in (True, False):
        for causal in (False, True):
            kernel, worst = Kernel(v, causal, debug), {}
            for b, h, s in SIZES[debug]:
                q, k, value, d_out = (torch.randn(b, h, s, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
                q *= 2
                out, lse, want = gradients(q, k, value, d_out, causal, torch.float32)
                _, _, theirs = gradients(q, k, value, d_out, causal, torch.bfloat16)
                got, run = kernel.plan(q, k, value, out.bfloat16(), lse, d_out)
                for t in got:
                    t.fill_(math.nan)
                try:
                    run()
                    torch.cuda.synchronize()
                except Exception as error:
                    print(f"{name}: {'debug ' if debug else ''}{'causal' if causal else 'full'} {b}x{h}x{s} DIED: {error}", flush=True)
                    return False
                records = run.dbg[0].item()
                if records:
                    good = False
                    print(f"{name}: {'causal' if causal else 'full'} {b}x{h}x{s} HUNG (a wait of over a second), {records} records:", flush=True)
                    seen = {}
                    for r in run.dbg[8:].view(-1, 8)[:min(records, 255)].tolist():
                        key = (PLACES[r[0]] if 0 <= r[0] < len(PLACES) else r[0], f"thread {r[2]}", f"parity {r[3]}", f"step {r[4]}", f"barrier {r[5]}")
                        seen.setdefault(key, []).append(r[1])
                    for key, blocks in list(seen.items())[:24]:
                        print("   ", *key, "programs", blocks[:8], len(blocks), flush=True)
                    return False
                first = [t.clone() for t in got]
                run()
                torch.cuda.synchronize()
                cells = []
                for title, mine, again, right, other in zip(("dQ", "dK", "dV"), first, got, want, theirs):
                    error = ((mine.float() - right).norm() / right.norm()).item()
                    biggest = ((mine.float() - right).abs().amax() / right.abs().amax()).item()
                    reference = ((other - right).norm() / right.norm()).item()
                    moves = ((again.float() - mine.float()).norm() / right.norm()).item()
                    fine = error < 1.5e-2 and moves < 3e-3 and (title == "dQ" or moves == 0)
                    cells.append(f"{title} {error:.1e} (bf16 torch {reference:.1e}, max {biggest:.1e}{f', MOVES {moves:.1e}' if moves > 3e-3 or (title != 'dQ' and moves) else ''}){'' if fine else ' WRONG'}")
                    worst[title] = [max(a, b) for a, b in zip(worst.get(title, [0.0] * 3), (error, reference, biggest))]
                    if not fine:
                        good = False
                        if hints < 4:
                            hints += 1
                            cells.append("\n      " + "\n      ".join(where_wrong(mine.float(), right, v.bm)) + "\n     ")
                if "WRONG" in "".join(cells):
                    print(f"{name}: {'debug ' if debug else ''}{'causal' if causal else 'full'} {b}x{h}x{s}: {'; '.join(cells)}", flush=True)
            print(f"{name}: {'debug ' if debug else ''}{'causal' if causal else 'full'}, {len(SIZES[debug])} sizes, worst error (of bf16 torch; largest): "
                  + ", ".join(f"{t} {x[0]:.1e} ({x[1]:.1e}; {x[2]:.1e})" for t, x in worst.items()), flush=True)
        if not good:
            break
    return good


def check(names):
    begin = time.perf_counter()
    names = [n for n in names if VARIANTS[n].right]
    jobs = [(n, c, d) for n in names for d in (True, False) for c in (False, True)]
    for (name, causal, debug), (_, log, _) in zip(jobs, compile_all([(VARIANTS[n], c, d) for n, c, d in jobs])):
        if "C75" in log:
            print(f"{name} {'causal' if causal else 'full'}{' debug' if debug else ''}: " + "; ".join(sorted(set(re.findall(r"C75[^\n]*", log)))), flush=True)
    print(f"compiled in {time.perf_counter() - begin:.1f} s", flush=True)

    def one(name):
        command = [sys.executable, str(Path(__file__).resolve()), "check-one", name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=25, cwd=HERE)
            return name, done.returncode == 0, done.stdout + (done.stderr[-1500:] if done.returncode else "")
        except subprocess.TimeoutExpired as error:
            return name, False, (error.stdout or b"").decode(errors="replace") + f"{name}: TIMED OUT (hung?)\n"

    found = {}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:                # four processes at a time: most of it is importing torch
        for name, good, text in pool.map(one, names):
            print(text, end="", flush=True)
            found[name] = good
    STATE.mkdir(parents=True, exist_ok=True)
    record = STATE / "right.json"
    record.write_text(json.dumps({**(json.loads(record.read_text()) if record.exists() else {}), **found}))
    print(f"\ncheck took {time.perf_counter() - begin:.0f} s: " + ", ".join(f"{n} {'right' if good else 'WRONG'}" for n, good in found.items()), flush=True)


# ---- time --------------------------------------------------------------------------------------------------------------
def bench(job, ms=60.0):
    """Median ms of single calls, timed by events; the L2 cache is not cleared (all tensors are much larger)."""
    import torch
    for _ in range(2):
        job()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    job()
    end.record()
    torch.cuda.synchronize()
    count = max(3, min(20, int(ms / max(begin.elapsed_time(end), 0.05))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for m in marks[1:]:
        job()
        m.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))


def forward_of(q, k, v, causal):
    """O in bf16 and lse, in float32 a few rows at a time: independent of any kernel."""
    import torch
    out, lse, s = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device), q.shape[2]
    for b in range(q.shape[0]):
        keys, values = k[b].float(), v[b].float()
        for i in range(0, s, 1024):
            x = q[b, :, i:i + 1024].float() @ keys.transpose(-1, -2) * 128 ** -0.5
            if causal:
                x.masked_fill_(torch.arange(s, device=q.device)[None] > torch.arange(i, i + x.shape[1], device=q.device)[:, None], -math.inf)
            lse[b, :, i:i + 1024] = x.logsumexp(-1)
            out[b, :, i:i + 1024] = (x.softmax(-1) @ values).to(q.dtype)
    return out, lse


def time_row(causal, length, peers, kernels):
    """TFLOP/s by name of one shape."""
    import torch
    batch, heads = 16384 // length, 16
    q, k, v, d_out = (torch.randn(batch, heads, length, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    title, jobs, results, wanted = f"{'causal' if causal else 'full'} S{length}", {}, {}, None
    for name, forward in peers.items():
        try:
            leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
            result = forward(*leaves, causal)
            job = lambda result=result, leaves=leaves: torch.autograd.grad(result, leaves, d_out, retain_graph=True)
            wanted = job()
            torch.cuda.synchronize()
            jobs[name] = job
        except Exception as error:
            print(f"{name} failed: {type(error).__name__}: {str(error).splitlines()[0][:100]}", flush=True)
    with torch.no_grad():
        out, lse = forward_of(q, k, v, causal)
    for name, kernel in kernels.items():
        results[name], jobs[name] = kernel.plan(q, k, v, out, lse, d_out)
    for job in jobs.values():
        job()
    torch.cuda.synchronize()
    for name, mine in results.items() if wanted is not None else ():
        errors = [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(mine, wanted)]
        if not all(e < 2e-2 for e in errors[0 if VARIANTS[name].right else 1:]):
            print(f"  {title} {name} DIFFERS from the peer, dQ dK dV: {errors}", flush=True)
    order, times = list(jobs), {n: [] for n in jobs}
    for turn in range(3):
        first = turn * len(order) // 3
        for name in order[first:] + order[:first]:
            times[name].append(bench(jobs[name]))
    main = {n: bench(jobs[n].main, 25.0) for n in kernels}                 # without pre- and postprocess (sums go on growing: only time counts)
    flops = 10 * batch * heads * length * length * 128 * (0.5 if causal else 1.0)
    rate = {n: flops / statistics.median(t) / 1e9 for n, t in times.items()}
    print(f"{title}: " + ", ".join(f"{n} {rate[n]:.0f}" + (f" ({flops / main[n] / 1e9:.0f} main alone)" if n in main else "") for n in jobs), flush=True)
    return title, rate


def time_all(names):
    """In a process of its own. Lines are printed as they come; the table last."""
    import torch
    torch.manual_seed(2)
    sys.path.insert(0, str(SRC))
    peers = {}
    try:
        import tilewise
        from tilewise import masks
        peers["gluon"] = lambda q, k, v, causal: tilewise.attention(q, k, v, mask=masks.causal if causal else None, backend="gluon")
    except Exception as error:
        print(f"no tilewise: {error}", flush=True)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def cudnn(q, k, v, causal):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    peers["cuDNN"] = cudnn
    rows, shown = [], [*peers, *names]
    for causal in (False, True):
        kernels = {n: Kernel(VARIANTS[n], causal) for n in names}
        for length in LENGTHS:
            title, rate = time_row(causal, length, peers, kernels)
            rows.append([title, *[f"{rate[n]:.0f}" if n in rate else "-" for n in shown]])
    width = [max(len(r[i]) for r in [["", *shown], *rows]) for i in range(len(shown) + 1)]
    print("\nTFLOP/s, whole backward, 16,384 tokens, heads x 128 = 2048")
    for r in [["", *shown], *rows]:
        print("  ".join(x.rjust(w) for x, w in zip(r, width)), flush=True)


def timed(names, everything):
    begin = time.perf_counter()
    found = json.loads((STATE / "right.json").read_text()) if (STATE / "right.json").exists() else {}
    base = {n: found.get(n, False) for n in VARIANTS}
    keep = [n for n in names if everything or base[n] or (not VARIANTS[n].right and base.get(n.split(" ")[0], any(base[m] for m in base if m.startswith(n.split(" ")[0]))))]
    print(f"timing {keep}; left out: {[n for n in names if n not in keep]}", flush=True)
    if keep:
        compile_all([(VARIANTS[n], c, False) for n in keep for c in (False, True)])
        try:
            done = subprocess.run([sys.executable, str(Path(__file__).resolve()), "time-all", ",".join(keep)], timeout=150, cwd=HERE)
            print(f"time took {time.perf_counter() - begin:.0f} s" + (f", FAILED ({done.returncode})" if done.returncode else ""), flush=True)
        except subprocess.TimeoutExpired:
            print("time: TIMED OUT (hung?)", flush=True)


if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    words = [w for w in sys.argv[2:] if not w.startswith("--")]
    names = words[0].split(",") if words and what != "build" else list(VARIANTS)
    if what == "build":
        names = words[1].split(",") if len(words) > 1 else names
        build(names, words[0] if words else STATE / "cubins")
    elif what == "check":
        check(names)
    elif what == "check-one":
        sys.exit(0 if check_one(words[0]) else 1)
    elif what == "time":
        timed(names, "--all" in sys.argv)
    elif what == "time-all":
        time_all(names)
    else:
        print(__doc__)
