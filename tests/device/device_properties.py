"""What the simulated accelerator does, called in the process that has it."""

import copy
import os

import simulated_device
import torch
from torch import nn

from echelon.strategies.devices.kinds import device_type_of
from echelon.testing import run_ranks

NAME = os.environ.get("ECHELON_TEST_DEVICE", "sim")


def device(index=0):
    return torch.device(NAME, index)


def known_as():
    """Return the accelerator and its backend, as torch has them, and the number of devices."""
    accelerator = torch.accelerator.current_accelerator()
    backend = torch.distributed.get_default_backend_for_device(accelerator)
    return accelerator.type, device_type_of("auto"), backend, torch.accelerator.device_count()


def adamw_as_on_the_cpu():
    """Return the largest difference after steps of AdamW, on two devices at once."""
    torch.manual_seed(0)
    on_cpu = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).double()
    modules = [on_cpu, copy.deepcopy(on_cpu).to(device(0)), copy.deepcopy(on_cpu).to(device(3))]
    x, y = torch.randn(5, 8, dtype=torch.float64), torch.randint(4, (5,))
    for module in modules:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        place = next(module.parameters()).device
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x.to(place)), y.to(place)).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
    return [
        max((a.cpu() - b).abs().max().item() for a, b in zip(module.parameters(), on_cpu.parameters(), strict=True))
        for module in modules[1:]
    ]


def copies_to_the_host():
    """Return a number read before somebody waits, and after the device, its stream or an event was waited for."""
    module = torch.get_device_module(NAME)
    read = []
    for wait in (
        lambda event: torch.accelerator.synchronize(),
        lambda event: module.current_stream().synchronize(),
        lambda event: event.synchronize(),
    ):
        value = torch.full((2,), 3.0, device=device())
        host = value.to("cpu", non_blocking=True)
        event = module.Event()
        event.record()
        before = host.tolist()
        value.fill_(7.0)
        wait(event)
        read.append((before[0] == before[0], host.tolist()))
    return read


def pinned_sources():
    """Return what arrives from pinned memory that is written before the copy has run, and after."""
    arrived = []
    for waits in (False, True):
        source = torch.zeros(2).pin_memory()
        target = source.to(device(), non_blocking=True)
        if waits:
            torch.accelerator.synchronize()
        source.fill_(5.0)
        arrived.append(target.cpu().tolist())
    return arrived


def side_streams():
    """Return what computation sees of a copy on another stream, without and with a wait between them."""
    module = torch.get_device_module(NAME)
    source, seen = torch.ones(2).pin_memory(), []
    for waits in (False, True):
        stream = module.Stream()
        with module.stream(stream):
            target = source.to(device(), non_blocking=True)
        if waits:
            module.current_stream().wait_stream(stream)
        seen.append((target + 1).cpu().tolist())
    return seen


def late_kernels():
    """Return what is seen of a kernel of another stream: its result, if an input is changed, and if one is freed.

    Each without the wait, or the record, that it takes, and with it.
    """
    module = torch.get_device_module(NAME)
    results, changed, freed = [], [], []
    for is_right in (False, True):
        own, stream = module.current_stream(), module.Stream()
        x, z = torch.ones(64, device=device()), torch.empty(64, device=device())
        stream.wait_stream(own)
        with module.stream(stream):
            y = x * 2
        if is_right:
            own.wait_stream(stream)
        results.append((y + 1).cpu().tolist())
        stream.wait_stream(own)
        with module.stream(stream):
            z.copy_(x)
        if is_right:
            own.wait_stream(stream)
        x.fill_(7.0)
        stream.synchronize()
        changed.append(z.cpu().tolist())
        with module.stream(stream):
            y = x + 1
        if is_right:
            x.record_stream(stream)
        del x
        torch.zeros(64, device=device())
        stream.synchronize()
        freed.append(y.cpu().tolist())
    return {"result": results, "changed": changed, "freed": freed}


def early_copies():
    """Return what a copy of another stream takes from a late kernel's result, without a wait and with one."""
    module, taken = torch.get_device_module(NAME), []
    simulated_device.library().set_early(True)
    try:
        for is_right in (False, True):
            own, stream = module.current_stream(), module.Stream()
            value = torch.ones(3, device=device()) * 2
            if is_right:
                stream.wait_stream(own)
            with module.stream(stream):
                host = torch.empty(3, pin_memory=True).copy_(value, non_blocking=True)
            torch.accelerator.synchronize()
            taken.append(host.tolist())
    finally:
        simulated_device.library().set_early(False)
    return taken


def there_and_back():
    """Return what comes back from the host's memory to the device, for which the host has not waited."""
    module, stream = torch.get_device_module(NAME), torch.get_device_module(NAME).Stream()
    host = torch.empty(3, pin_memory=True)
    host.copy_(torch.full((3,), 4.0, device=device()), non_blocking=True)
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        value = torch.empty(3, device=device()).copy_(host, non_blocking=True)
    module.current_stream().wait_stream(stream)
    seen_here = host.tolist()
    return (value + 1).cpu().tolist(), seen_here == [4.0] * 3


def freed_memory():
    """Return whether a tensor freed while another stream copies from it comes whole, without and with record_stream."""
    module, whole = torch.get_device_module(NAME), []
    for records in (False, True):
        value, stream = torch.full((64,), 2.0, device=device()), module.Stream()
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            host = value.to("cpu", non_blocking=True)
        if records:
            value.record_stream(stream)
        del value
        other = torch.zeros(64, device=device())
        stream.synchronize()
        whole.append(bool((host == 2).all()))
        del other
    return whole


def waits_in(action):
    """Return the lines that made the host wait while it ran."""
    library = simulated_device.library()
    library.taken_waits()
    library.count_waits(True)
    try:
        action()
    finally:
        library.count_waits(False)
    return library.taken_waits()


def counted_waits():
    """Return what is counted in some operations that wait, and in some that do not."""
    a, b = torch.ones(3, device=device()), torch.ones(3).pin_memory()
    waiting = {
        "item": lambda: a.sum().item(),
        "cpu": a.cpu,
        "from pageable": lambda: torch.ones(3).to(device()),
        "synchronize": torch.accelerator.synchronize,
        "equal": lambda: torch.equal(a, a),
    }
    not_waiting = {
        "computation": lambda: (a * 2).softmax(0).sum(),
        "pinned": lambda: b.to(device(), non_blocking=True),
        "to host": lambda: a.to("cpu", non_blocking=True),
    }
    return (
        {name: [__file__ in wait for wait in waits_in(action)] for name, action in waiting.items()},
        {name: waits_in(action) for name, action in not_waiting.items()},
    )


def generators():
    """Return whether devices draw from generators of their own, that can be seeded, kept and put back."""
    module = torch.get_device_module(NAME)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    drawn = [torch.rand(4, device=device(index)).cpu() for index in (0, 1)]
    is_untouched = torch.equal(before, torch.get_rng_state())
    state = module.get_rng_state(1)
    following = torch.rand(4, device=device(1)).cpu()
    module.set_rng_state(state, 1)
    again = torch.rand(4, device=device(1)).cpu()
    own = torch.Generator(device(2)).manual_seed(3)
    of_own = torch.rand(4, device=device(2), generator=own).cpu()
    return {
        "seeded alike": torch.equal(drawn[0], drawn[1]),
        "untouched": is_untouched,
        "put back": torch.equal(following, again) and not torch.equal(following, drawn[1]),
        "own": torch.equal(of_own, drawn[0]),
    }


def wrong_generator():
    try:
        torch.rand(4, device=device(), generator=torch.Generator())
    except RuntimeError as error:
        return str(error)
    return ""


def autocast_dtypes():
    """Return dtypes of results under autocast of the device, and under that of the CPU."""
    module, x = nn.Linear(4, 4).to(device()), torch.randn(2, 4, device=device())
    with torch.autocast(NAME, torch.bfloat16):
        own = module(x).dtype, x.exp().dtype
    with torch.autocast("cpu", torch.bfloat16):
        others = module(x).dtype
    return [str(dtype) for dtype in (*own, others)]


def communication():
    """Return the sum over two ranks as seen without a wait for the collective, and after one."""
    return run_ranks(_reduced, 2)


def _reduced():
    import torch.distributed as dist

    torch.get_device_module(NAME).set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(f"cpu:gloo,{NAME}:{simulated_device.BACKEND}")
    value = torch.full((3,), 1.0 + dist.get_rank(), device=NAME)
    work = dist.all_reduce(value, async_op=True)
    before = (value * 2).cpu().tolist()
    work.wait()
    after = (value * 2).cpu().tolist()
    dist.destroy_process_group()
    return before, after


def memory():
    """Return the bytes that a tensor of a MB adds, the peak, and the error and the number of retries at a limit."""
    library, accelerator = simulated_device.library(), torch.accelerator
    accelerator.empty_cache()
    start = accelerator.memory_allocated()
    accelerator.reset_peak_memory_stats()
    large = torch.zeros(1 << 20, dtype=torch.uint8, device=device())
    added, peak = accelerator.memory_allocated() - start, accelerator.max_memory_allocated() - start
    del large
    left = accelerator.memory_allocated() - start
    library.set_limit(0, accelerator.memory_reserved() + (1 << 20))
    try:
        torch.zeros(3 << 20, dtype=torch.uint8, device=device())
    except torch.OutOfMemoryError as error:
        said = str(error)
    finally:
        library.set_limit(0, 8 << 30)
    return added, peak, left, said


def forked():
    """Return what a child says that uses the device after this process has."""
    torch.ones(1, device=device())
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device=device())
            said = "nothing"
        except RuntimeError as error:
            said = str(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(reader, 1000).decode()
