"""The samples vary every parameter that an op has: a rule that ignores one is caught by its claims."""

from collections import defaultdict

from sbp.passes.program.trace import trace
from tests.rules import samples_lookup
from tests.rules.test_claims import SAMPLES

# Parameters that the samples leave as they are: of one op, or of any.
LEFT_ALONE = {
    "how exactly a function is computed, or how fast, never what": """
        accuracy algorithm conjugate_a implementation is_stable precision recall_target use_magma
        reduction_input_size_override
    """,
    "where JAX itself would put the result: the plan decides that": """
        copy_semantics devices out_sharding sharding srcs
    """,
    "another decomposition of the same whole matrices, which are never split": """
        compute_left_eigenvectors compute_right_eigenvectors compute_schur_vectors enable_eigvec_derivs
        full_matrices lower permutation_size perturb_singular pivoting select_callable sort_eig_vals
        sort_eigenvalues subset_by_index
    """,
    "numbers that one device draws, or that a key decides": "dtype impl log_space shape",
    "of this project's own ops, varied in tests/rules/test_lookup.py": """
        capacity fill_value pin samples wire_dtype
    """,
    "not made by JAX's public functions": "group_offset out_dtype preferred_element_type weak_type",
    "constants of a function, which are part of it": "consts update_consts",
    "which dim is new, or gone, or comes first: the letters say so": "axis permutation",
    "says no more than the name of the op": "name select_prim update_jaxpr",
}


def test_every_parameter_is_varied_or_has_a_reason() -> None:
    seen: dict[tuple[str, str], set[str]] = defaultdict(set)
    for one in [*SAMPLES, *samples_lookup.SAMPLES]:
        for node in trace(one.fn, one.args, {}).graph.walk():
            if node.op == one.name:
                for parameter, value in node.params.items():
                    seen[node.op, parameter].add(repr(value))
    same = {(op, parameter) for (op, parameter), values in seen.items() if len(values) < 2}
    left = {parameter for text in LEFT_ALONE.values() for parameter in text.split()}
    assert not {(op, parameter) for op, parameter in same if parameter not in left}


def test_every_reason_is_needed() -> None:
    samples = [*SAMPLES, *samples_lookup.SAMPLES]
    used = {p for one in samples for n in trace(one.fn, one.args, {}).graph.walk() for p in n.params}
    reasons = [parameter for text in LEFT_ALONE.values() for parameter in text.split()]
    assert set(reasons) <= used and len(reasons) == len(set(reasons))
