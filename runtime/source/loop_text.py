"""The part of a module with stages that is the same in all of them: how its tables are run."""

NAMES = (
    "MESHES LIES Piece PIECES SENDS FETCHED ARGUMENTS RESULTS BEFORE AFTER MICROBATCHES SCHEDULE READERS "
    "RECEIVED Counter deque Any NamedTuple NamedSharding compiled put fetch keys run pieces_of ready"
).split()
"""What the module itself calls so."""

PIECE = '''\
class Piece(NamedTuple):
    """What a placement runs in one go: a function of shards, and what it reads and makes.

    [i] behind a name: each micro-batch has its own; [:] those of all micro-batches.
    """

    place: int
    function: Any
    reads: tuple[str, ...]
    makes: tuple[str, ...]

'''

SENDS = "# What is sent when a piece has run: its name, the placement that it is for, its name there."
FETCHED = "# What is sent once, when it is read: the placement that has it, and its name there."
ARGUMENTS = "# The placements that want a leaf of the arguments, and its name there."
RESULTS = "# The placement that has a leaf of the results, and its name there."
ACTIONS = "F2:0 is the forward pass of stage 2 for micro-batch 0; a row per placement"

_RUNNING = '''\
READERS = Counter((p.place, x.replace("[:]", "[i]")) for p in PIECES.values() for x in p.reads)
RECEIVED = {(place, there) for some in SENDS.values() for _, place, there in some}


@functools.cache
def compiled(label):
    """The program of a piece, of whole arrays."""
    piece = PIECES[label]
    lies = LIES[piece.place]
    ins = [lies[name.replace("[:]", "[i]")] for name in piece.reads for _ in keys(name, 0)]
    on_devices = jax.shard_map(
        piece.function, mesh=MESHES[piece.place], in_specs=(PartitionSpec(), *ins),
        out_specs=tuple(lies[name] for name in piece.makes), check_vma=False,
    )
    return jax.jit(on_devices)


def keys(name, microbatch):
    """What arrays are kept by: x[i] of micro-batch 3 by x[3]."""
    if name.endswith("[:]"):
        return [f"{name[:-3]}[{k}]" for k in range(MICROBATCHES)]
    return [name.replace("[i]", f"[{microbatch}]")]


def put(x, place, name):
    """An array on a placement, as it lies there."""
    return jax.device_put(x, NamedSharding(MESHES[place], LIES[place][name]))


def fetch(arrays, place, key):
    """An array of a placement; what another one has made once is sent now."""
    if key not in arrays[place]:
        source, there = FETCHED[place, key]
        arrays[place][key] = put(fetch(arrays, source, there), place, key)
    return arrays[place][key]


def run(arrays, uses, label, microbatch=0):
    """Runs a piece, sends what others want of it, and drops what nobody will read any more."""
    place, _, reads, makes = PIECES[label]
    given = [fetch(arrays, place, key) for name in reads for key in keys(name, microbatch)]
    made = dict(zip(makes, compiled(label)(np.int32(microbatch), *given)))
    for name, to, there in SENDS.get(label, ()):
        arrays[to][keys(there, microbatch)[0]] = put(made[name], to, there)
    for name, x in made.items():
        if not name.endswith("[i]") or (place, name) in READERS:
            arrays[place][keys(name, microbatch)[0]] = x
    for name in reads:
        if name.endswith("[i]"):
            (key,) = keys(name, microbatch)
            uses[place, key] += 1
            if uses[place, key] == READERS[place, name]:
                del arrays[place][key]
'''

_SCHEDULED = '''

def pieces_of(action):
    """What an action runs: a backward pass may be two pieces, a stage may have nothing to do."""
    label = action.partition(":")[0]
    halves = (label.replace("B", "I"), label.replace("B", "W"))
    return [x for x in dict.fromkeys((label, *halves)) if x in PIECES]


def ready(arrays, action, microbatch):
    """Whether what others send for an action has come."""
    pieces = [PIECES[label] for label in pieces_of(action)]
    wanted = [(p.place, name) for p in pieces for name in p.reads if (p.place, name) in RECEIVED]
    return all(keys(name, microbatch)[0] in arrays[place] for place, name in wanted)
'''

_LOOP = """\
    waiting = [deque(row.split()) for row in SCHEDULE]
    while any(waiting):
        for row in waiting:
            while row and ready(arrays, row[0], microbatch := int(row[0].partition(":")[2])):
                for label in pieces_of(row.popleft()):
                    run(arrays, uses, label, microbatch)
"""


def run_functions(scheduled: bool) -> list[str]:
    """The functions that run pieces.

    Arguments:
      scheduled: whether there are micro-batches.
    """
    text = _RUNNING + (_SCHEDULED if scheduled else "")
    if not scheduled:
        text = text.replace("range(MICROBATCHES)", "range(0)")
    return text.rstrip("\n").split("\n")


def entry(name: str, scheduled: bool) -> list[str]:
    """The function of whole arrays."""
    head = f'''\
def {name}(*leaves):
    """Whole arrays in the order of ARGUMENTS in, whole arrays in the order of RESULTS out."""
    arrays, uses = [{{}} for _ in MESHES], Counter()
    for x, wanted in zip(leaves, ARGUMENTS):
        for place, name in wanted:
            arrays[place][name] = put(x, place, name)
    for label in BEFORE:
        run(arrays, uses, label)
'''
    tail = """\
    for label in AFTER:
        run(arrays, uses, label)
    return tuple(fetch(arrays, place, name) for place, name in RESULTS)
"""
    return (head + (_LOOP if scheduled else "") + tail).rstrip("\n").split("\n")
