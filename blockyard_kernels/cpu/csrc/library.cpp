// The C surface of the kernels: one library for each instruction set, with these names.
#include "arithmetic.h"
#include "decode_loop.h"
#include "drafting.h"
#include "executor.h"
#include "pack.h"
#include "pack_int8.h"
#include "sampling.h"

namespace {

template <class E>
void pack_int8(Executor* executor, const void* const* rows, int64_t num_panels, int64_t width, Int8Panels packed) {
    Int8Packing<E> packing(rows, num_panels, width, packed, executor->num_threads());
    executor->team().run(packing);
}

}  // namespace

extern "C" {

// A product, one number at a time: see arithmetic.h.
void blockyard_spell_out(const SpelledProduct* product) { spell_out(*product); }

// Sizes of the structures that cross the border, and of a panel: Python compares them with its own.
int64_t blockyard_op_bytes() { return sizeof(Op); }
int64_t blockyard_inputs_bytes() { return sizeof(Inputs); }
int64_t blockyard_panel_columns() { return TILE_COLUMNS; }

// Null where the system refuses what this library computes with.
void* blockyard_create(int32_t num_threads) {
#if defined(HAS_TILES)
    if (!request_tiles()) return nullptr;
#endif
    return new Executor(num_threads);
}
void blockyard_destroy(void* executor) { delete (Executor*)executor; }

// Bytes of an executor's memory for attention, at most: see attention_units.h.
int64_t blockyard_attention_bytes(const void* executor) { return ((const Executor*)executor)->attention_bytes(); }

void blockyard_run(void* executor, const Op* ops, int32_t num_ops, const Inputs* inputs) {
    ((Executor*)executor)->run(ops, num_ops, *inputs);
}

// Gives of each phase of the last run its op and how many seconds it took.
int32_t blockyard_phase_times(const void* executor, int32_t* ops, double* seconds, int32_t size) {
    return ((const Executor*)executor)->phase_times(ops, seconds, size);
}

// Packs rows of words with an executor's team: see pack.h.
void blockyard_pack(void* executor, const void* const* rows, int64_t num_panels, int64_t words, void* packed) {
    Packing packing(rows, num_panels, words, (uint32_t*)packed);
    ((Executor*)executor)->team().run(packing);
}

// Quantizes and packs rows of so many elements of a type: see pack_int8.h.
void blockyard_pack_int8(
    void* executor, const void* const* rows, int64_t num_panels, int64_t width, int32_t type, int32_t leaves, void* words,
    float* scales, int32_t* sums) {
    const Int8Panels packed{(uint32_t*)words, scales, sums, leaves};
    if (type == BFLOAT16)
        pack_int8<bf16>((Executor*)executor, rows, num_panels, width, packed);
    else
        pack_int8<float>((Executor*)executor, rows, num_panels, width, packed);
}
// Writes drafts of rows, in the calling thread: see drafting.h.
void blockyard_find_drafts(const DraftRows* wanted) { find_drafts(*wanted); }
// The reductions of sampling: see sampling.h.
void blockyard_find_finite_rows(void* executor, const float* logits, int64_t rows, int64_t vocab_size, uint8_t* finite) {
    find_finite_rows(((Executor*)executor)->team(), logits, rows, vocab_size, finite);
}
void blockyard_apply_masks(void* executor, const Masks* masks) { apply_masks(((Executor*)executor)->team(), *masks); }
void blockyard_choose(void* executor, const Choices* choices) { choose(((Executor*)executor)->team(), *choices); }
void blockyard_token_logprobs(void* executor, const TokenLogprobs* wanted) {
    token_logprobs(((Executor*)executor)->team(), *wanted);
}

// Steps without Python: see decode_loop.h and step_queue.h. Only `run` waits, and belongs to the thread that computes.
int64_t blockyard_decode_rows_bytes() { return sizeof(DecodeRows); }
int64_t blockyard_progress_bytes() { return sizeof(Progress); }
void* blockyard_loop_create(int32_t event) { return new DecodeLoop(event); }
void blockyard_loop_destroy(void* loop) { delete (DecodeLoop*)loop; }
void blockyard_loop_open(
    void* loop, void* executor, const DecodeRows* rows, int64_t last_step_id, const int64_t* record, int64_t size) {
    ((DecodeLoop*)loop)->set_rows((Executor*)executor, *rows, last_step_id);
    ((DecodeLoop*)loop)->queue.open(StepWords(record, record + size));
}
int64_t blockyard_loop_run(void* loop) { return ((DecodeLoop*)loop)->run(); }
// Returns how many records are left, whose numbers `left` writes.
int64_t blockyard_loop_close(void* loop) { return ((DecodeLoop*)loop)->queue.close(); }
void blockyard_loop_left(void* loop, int64_t* numbers) { ((DecodeLoop*)loop)->queue.left(numbers); }
int32_t blockyard_loop_push(void* loop, const int64_t* record, int64_t size) {
    return ((DecodeLoop*)loop)->queue.push(StepWords(record, record + size));
}
void blockyard_loop_end(void* loop, int32_t drops) { ((DecodeLoop*)loop)->queue.end(drops); }
void blockyard_loop_tell(void* loop, int64_t number) { ((DecodeLoop*)loop)->queue.tell(number); }
int64_t blockyard_loop_take(void* loop, int64_t* words) { return ((DecodeLoop*)loop)->queue.take(words); }
}
