// The C surface of the kernels: one library for each instruction set, with these names.
#include "executor.h"

namespace {

template <class E>
void pack_rows(const void* weight, int64_t n, int64_t k, int32_t gated, void* packed) {
    pack((const E*)weight, n, k, gated != 0, (E*)packed);
}

}  // namespace

extern "C" {

// Sizes of the structures that cross the border, and of a panel: Python compares them with its own.
int64_t blockyard_op_bytes() { return sizeof(Op); }
int64_t blockyard_inputs_bytes() { return sizeof(Inputs); }
int64_t blockyard_panel_columns() { return TILE_COLUMNS; }

void* blockyard_create(int32_t num_threads) { return new Executor(num_threads); }
void blockyard_destroy(void* executor) { delete (Executor*)executor; }

void blockyard_run(void* executor, const Op* ops, int32_t num_ops, const Inputs* inputs) {
    ((Executor*)executor)->run(ops, num_ops, *inputs);
}

// Tells of each phase of the last run its op and how many seconds it took.
int32_t blockyard_phase_times(const void* executor, int32_t* ops, double* seconds, int32_t size) {
    return ((const Executor*)executor)->phase_times(ops, seconds, size);
}

// Packs a weight [n, k]: see linear.h.
void blockyard_pack(const void* weight, int64_t n, int64_t k, int32_t type, int32_t gated, void* packed) {
    if (type == BFLOAT16)
        pack_rows<bf16>(weight, n, k, gated, packed);
    else
        pack_rows<float>(weight, n, k, gated, packed);
}
}
