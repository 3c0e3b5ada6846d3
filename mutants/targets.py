"""The modules that are mutated, and the tests that stand for each; what is left out, and why.

A module that imports nothing of `EDGE` is one or the other; some that use torch, the environment or files are
targets, too, where their tests are quick.
"""

from collections.abc import Mapping, Sequence

# Who imports one of these works on Ray, tensors, processes, files or threads.
EDGE = (
    *("argparse", "asyncio", "atexit", "concurrent", "contextvars", "ctypes", "fcntl", "gc", "http"),
    *("importlib", "mmap", "multiprocessing", "os", "ray", "rich", "select", "selectors", "shutil", "signal"),
    *("socket", "subprocess", "tempfile", "threading", "torch", "weakref"),
)

PLAN = ("planning/test_plan.py", "planning/test_search.py")
DECLARED = ("declared/test_declarations.py", "declared/test_declared_calls.py")
COLUMNS = ("columns/operations", "test_batch.py", "test_batch_hostile.py")
FITTING = ("packing/test_values.py", "packing/test_packing.py", "packing/test_plan.py")
GROUPS = ("process_groups/test_plans.py",)
DIRECTORY = ("weights/directory/test_record.py", "weights/directory/test_directory.py")
LAYOUTS = ("weights/resharding/test_reshard_plan.py", "weights/resharding/test_moving.py")
DIGEST = ("spec/test_digest.py", "spec/test_spec.py")

# Module (below the package's import name) and the tests that stand for it (below the package's tests).
TARGETS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "worker-groups": {
        "balancing/_strategies": ("balancing/test_balancing_strategies.py",),
        "_calls/methods/dispatch": ("calls/methods/test_dispatch.py",),
        "_calls/encoding": ("calls/test_encoding.py",),
        "_calls/answers/results": ("calls/answers/test_awaiting.py", "calls/answers/test_gathering.py"),
        "_calls/sizes": ("calls/test_sizes.py", "calls/test_encoding.py"),
        "_calls/answers/tasks": ("calls/answers/test_awaiting.py",),
        "_calls/answers/waiting": ("calls/answers/test_waiting.py",),
        "_declared/declaration": DECLARED,
        "_declared/decorators": DECLARED,
        "_declared/joining": ("declared/test_joining.py", *DECLARED),
        "_declared/rows": ("declared/test_row_values.py", *DECLARED),
        "_declared/splitting": DECLARED,
        "_declared/totals": ("declared/test_totals.py", *DECLARED),
        "_health/on_nodes/family": ("health/on_nodes/test_family.py",),
        "_health/on_nodes/limits": ("health/on_nodes/test_limits.py",),
        "_health/on_nodes/marks": ("health/on_nodes/test_process_table.py", "health/on_nodes/test_family.py"),
        "_health/on_nodes/process_table": ("health/on_nodes/test_process_table.py",),
        "_health/reports": ("health/test_reports.py",),
        "_life/states": ("life/test_states.py",),
        "_life/budget": ("life/test_budget.py",),
        "_ranks": ("test_ranks.py",),
        "_start/generations": ("start/test_generations.py",),
        "_start/spec/options": ("start/spec/test_group_options.py", "start/test_describing.py"),
        "_start/spec/sizes": ("start/spec/test_memory_sizes.py",),
        "_worker/meeting": ("worker/test_meeting.py",),
        "_worker/options": ("worker/test_options.py",),
        "balancing/_stream": ("balancing/test_balancing_stream.py",),
        "fan_out/_batches": ("fan_out/test_fan_out_batches.py",),
        "fan_out/_outcomes": ("fan_out/test_fan_out_outcomes.py",),
        "fan_out/_processes/journal": ("fan_out/test_fan_out_journal.py",),
        "sharding": ("test_sharding.py",),
    },
    "cluster-core": {
        "_connection/environment": ("connection/test_environment.py",),
        "_devices/binding": ("devices/test_devices.py",),
        "_placement/ledger": ("test_testing.py", "placement/test_ledger.py"),
        "_placement/options": ("placement/test_options.py",),
        "_placement/returning": ("placement/test_returning.py",),
        "_planning/bundle_packing": PLAN,
        "_planning/bundle_spec": (*PLAN, "placement/test_options.py"),
        "_planning/explanation": PLAN,
        "_planning/ordering": (*PLAN, "planning/test_segments.py"),
        "_planning/parts": PLAN,
        "_planning/plan": PLAN,
        "_planning/request": (*PLAN, "placement/test_options.py"),
        "_planning/search": PLAN,
        "_planning/segments": ("planning/test_segments.py", *PLAN),
        "_ray/census": ("placement/test_allocation.py", "placement/test_uneven_nodes.py"),
        "_topology": ("test_topology.py", *PLAN),
        "testing/_fake": ("test_testing.py",),
    },
    "venv-manager": {
        "_spec/digest": DIGEST,
        "_build/content": ("building/test_carried_identity.py",),
        "_build/inventory": ("store/test_upkeep.py",),
        "_build/recipe": ("store/test_store.py",),
        "_local/credentials": ("uv/test_access.py", "uv/test_secrets.py"),
        "_local/fingerprints": ("local/test_lock_places.py", "spec/test_digest.py"),
        "_local/listed": ("local/test_listed.py",),
        "_local/sources": ("local/test_sources.py", "spec/test_digest.py"),
        "_resolving/choices": ("store/test_upgrade.py",),
        "_resolving/flags": ("resolving/test_build_settings.py",),
        "_resolving/ignored": ("resolving/test_counted_sources.py",),
        "_spec/given": ("spec/test_digest.py", "local/test_lock_places.py"),
        "_spec/interpreters": DIGEST,
        "_spec/locks": ("local/test_lock_places.py", *DIGEST),
        "_spec/spec": DIGEST,
        "_spec/uv_settings": ("spec/test_digest.py", "uv/test_configuration.py"),
        "_spec/variables": ("uv/test_secrets.py", "spec/test_digest.py", "uv/test_access.py"),
        "_store/trust": ("store/test_trust.py",),
        "_uv/configuration": ("uv/test_configuration.py", "uv/test_indexes.py"),
        "_uv/indexes": ("uv/test_indexes.py", "uv/test_configuration.py"),
        "_uv/order": ("uv/test_configuration.py",),
        "_uv/pip_settings": ("uv/test_configuration.py", "uv/test_indexes.py"),
        "_uv/uv_run": ("spec/test_spec.py", "uv/test_requirement_forms.py"),
    },
    "tensor-transport": {
        "_rows/views": ("rows/test_view_values.py", "rows/test_views.py"),
        "_rows/arrays": ("rows",),
        "_rows/counts": ("rows", "test_batch_hostile.py"),
        "_rows/indexing": ("rows/test_indexing.py", "rows/test_view_values.py"),
        "_rows/passes": ("rows", "columns/test_iterating.py"),
        "_rows/shards": ("rows", "test_rtensor.py"),
        "_bytes/arenas": ("bytes/test_codec.py", "backends/test_shared_memory.py"),
        "_bytes/codec": ("bytes/test_codec.py",),
        "_bytes/folding": ("bytes/test_fold.py",),
        "_columns/checksums": ("columns/test_iterating.py", "weights/update/test_checksum.py"),
        "_columns/encoding/frame": ("columns/operations/test_saving.py",),
        "_columns/iterating": ("columns/test_iterating.py",),
        "_columns/joining/columns": (*COLUMNS, "columns/joining/test_metadata.py"),
        "_columns/joining/metadata": ("columns/joining/test_metadata.py", "test_batch_hostile.py"),
        "_columns/kinds/accepting": ("test_batch_hostile.py", "test_batch.py"),
        "_columns/kinds/casting": ("columns/kinds/test_casting.py",),
        "_columns/kinds/padding": ("columns/kinds/test_ragged.py", "test_batch_hostile.py"),
        "_columns/lengths": COLUMNS,
        "_columns/naming": COLUMNS,
        "_columns/operations/rows": COLUMNS,
        "_columns/table": COLUMNS,
        "_handles/arguments": ("handles/test_walk.py", "test_rtensor.py"),
        "packing/_bins": FITTING,
        "packing/_fitting": FITTING,
        "packing/_plan": FITTING,
        "packing/_sharded": (*FITTING, "test_batch_hostile.py"),
        "process_groups/_broadcasting/pieces": GROUPS,
        "process_groups/_membership/cause": GROUPS,
        "process_groups/_membership/invitation": GROUPS,
        "process_groups/_membership/seat": GROUPS,
        "transports/_choosing/choice": ("transports/test_choice.py",),
        "weights/_directory/ballots": DIRECTORY,
        "weights/_directory/freed": ("weights/directory/test_freed.py", *DIRECTORY),
        "weights/_directory/lineage": DIRECTORY,
        "weights/_directory/record": DIRECTORY,
        "weights/_directory/relay": DIRECTORY,
        "weights/_directory/shelf": DIRECTORY,
        "weights/_directory/telling": DIRECTORY,
        "weights/_directory/versions": ("weights/directory/test_version_numbers.py", *DIRECTORY),
        "weights/_receiving/held": ("weights/test_weights.py", "weights/deltas/test_delta_updates.py"),
        "weights/_receiving/member": ("weights/test_weights.py", "weights/syncing/test_weight_sync.py"),
        "weights/_syncing/report": ("weights/syncing/test_weight_sync.py",),
        "weights/_syncing/session": ("weights/syncing/test_weight_sync.py",),
        "weights/_update/manifest": ("weights/update/test_checksum.py", "weights/test_weights.py"),
        "weights/_update/regions": ("weights/test_weights.py", "weights/test_options.py"),
        "weights/_update/spans": ("weights/test_weights.py", "weights/syncing/test_weight_sync.py"),
        "weights/_update/stores": ("weights/update/test_stores.py",),
        "weights/deltas/_codec": ("weights/deltas/test_delta_codec.py",),
        "weights/deltas/_packed": (
            "weights/deltas/test_delta_codec.py",
            "weights/deltas/test_delta_updates.py",
        ),
        "weights/resharding/_layouts/boxes": LAYOUTS,
        "weights/resharding/_layouts/builders": LAYOUTS,
        "weights/resharding/_layouts/fusing": LAYOUTS,
        "weights/resharding/_layouts/layout": LAYOUTS,
        "weights/resharding/_planning/agreement": LAYOUTS,
        "weights/resharding/_planning/needs": LAYOUTS,
        "weights/resharding/_planning/plan": LAYOUTS,
    },
}

WORDS = "names, signatures and messages"
ON_RAY = "calls what talks to Ray: its promises are tested on a Ray"
WITH_UV = "calls what runs uv: its promises are tested with uv"
ON_PROCESSES = "calls what works on processes or files: its promises are tested on them"

# Modules that import nothing of `EDGE`, and the reason why they are not mutated.
LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    "cluster-core": {"errors": WORDS, "protocols": WORDS},
    "worker-groups": {
        "_calls/methods/callees": ON_RAY,
        "_calls/closing": ON_RAY,
        "_calls/methods/declared": ON_RAY,
        "_calls/methods/group_calls": ON_RAY,
        "_calls/methods/typed": WORDS,
        "_group": ON_RAY,
        "_handles/handle": ON_RAY,
        "_handles/members": ON_RAY,
        "_health/group_health": ON_RAY,
        "_start/copies": ON_RAY,
        "_start/spec/spec": ON_RAY,
        "errors": WORDS,
        "protocols": WORDS,
    },
    "tensor-transport": {
        "_memory/machine": ON_PROCESSES,
        "_ray/session": ON_RAY,
        "errors": WORDS,
        "process_groups/_forming": ON_PROCESSES,
        "process_groups/_membership/watch": ON_PROCESSES,
        "process_groups/_process/deadline": ON_PROCESSES,
        "transports/shared_memory": ON_PROCESSES,
        "weights/_receiving/receipt": WORDS,
        "weights/_routing/route": WORDS,
    },
    "venv-manager": {
        "_nodes/prefetching": ON_RAY,
        "_resolving/request": WITH_UV,
        "_resolving/resolution": WITH_UV,
        "_resolving/wanted": WITH_UV,
        "errors": WORDS,
        "protocols": WORDS,
    },
}
