// Paged attention over one pool: each row to its sequence's keys, up to its own position or all of them.
//
// The inner layout of a (block, layer, head): keys [D words][block_size] words, values [block_size words][D] words, so
// that both products read them as packed right sides, of vectors or of AMX's tiles. Keys are cut at multiples of 256
// positions. Within a cut a row takes the maximum of its own scores, exponentials rounded to the type of the values,
// their sum and product; cuts are merged in order with a running maximum (Milakov and Gimelshein, arXiv 1805.02867).
// A key that a row does not see has a weight of exactly zero, so neither the row's neighbours nor the cutting of a step
// into batches can change a bit.
// A pool in int8 has the same layout of words: see kv_int8.h.
#pragma once

#include "kv_int8.h"

struct PoolShape {
    int64_t block_stride, layer_offset, num_kv_heads;
    int64_t tile;  // elements of a head's keys in a block

    template <class E>
    const E* keys(const void* pool, int64_t block, int64_t head) const {
        return (const E*)pool + block * block_stride + layer_offset + head * tile;
    }
    template <class E>
    const E* values(const void* pool, int64_t block, int64_t head) const {
        return keys<E>(pool, block, num_kv_heads + head);
    }
};

inline PoolShape pool_shape(const Op& op) {
    const int64_t scale_bytes = op.kv_scheme == INT8 ? sizeof(float) : 0;
    return {op.block_stride, op.layer_offset, op.num_kv_heads, op.block_size * (op.head_dim + scale_bytes)};
}

// One unit of attention: a tile and a head, from the first of all keys on, or one cut of them that is computed alone.
struct AttentionUnit {
    const AttentionTile* tile = nullptr;
    int64_t head = 0, first_key = 0;
};

// The keys that rows of a step see.
struct VisibleKeys {
    const Op* op;
    const Step* step;

    // The beginning of the first cut of which a row of the tile sees a key.
    int64_t first_cut(const AttentionTile& tile) const {
        return op->window ? std::max<int64_t>(0, tile.first_position - op->window + 1) / CUT * CUT : 0;
    }

    // Behind the last key that a row of these sees, of which the last one is at `position`.
    int64_t end(int32_t sequence, int64_t position) const {
        if (!op->sees_later) return position + 1;
        const int64_t length = step->inputs().seq_lens[sequence];
        return op->window ? std::min(length, position + op->window) : length;
    }

    int64_t end(const AttentionTile& tile) const { return end(tile.sequence, tile.first_position + tile.num_tokens - 1); }
};

inline int64_t padded_dim(int64_t dim) { return (dim + VL - 1) / VL * VL; }

// The results of a cut for some rows: the product of their weights and the values, the maximum of their scores, and the
// sum of their weights.
struct CutResults {
    float* products;  // [rows][padded head_dim]
    float* maxima;    // [rows]
    float* sums;      // [rows]

    // The results of rows from `first` on, of so many rows that lie at a place.
    static CutResults at(float* place, int64_t num_rows, int64_t padded, int64_t first = 0) {
        float* maxima = place + num_rows * padded;
        return {place + first * padded, maxima + first, maxima + num_rows + first};
    }

    // Whole vectors.
    static int64_t num_floats(int64_t num_rows, int64_t padded) { return (num_rows * (padded + 2) + VL - 1) / VL * VL; }
};

// One thread's memory for the tile that it computes.
template <class E>
struct AttentionScratch {
    explicit AttentionScratch(int64_t dim)
        : dim(dim), padded(padded_dim(dim)), query(MAX_ATTENTION_ROWS * dim), scores(MAX_ATTENTION_ROWS * CUT),
          weights(MAX_ATTENTION_ROWS * CUT), results(CutResults::num_floats(MAX_ATTENTION_ROWS, padded)),
          totals(MAX_ATTENTION_ROWS * padded) {}

    int64_t dim, padded;
    std::vector<E> query;
    std::vector<uint32_t> keys, values;
    std::vector<float> scores;
    std::vector<E> weights;
    std::vector<float> results, totals;
    float maxima[MAX_ATTENTION_ROWS], sums[MAX_ATTENTION_ROWS];
    DigitScratch digits;
};

// `S`: what keys and values are held in, the op's type or bytes whose dot product the processor has.
template <class E, class S = E>
class AttentionRunner {
   public:
    AttentionRunner(const Op& op, const Step& step, AttentionScratch<E>& scratch)
        : op_(op), step_(step), visible_{&op, &step}, pool_(pool_shape(op)), scratch_(scratch),
          group_(op.num_heads / op.num_kv_heads), dim_words_(op.head_dim / PER_WORD<S>),
          scale_((op.softcap ? op.softcap : op.scale) * LOG2_OF_E) {
        if constexpr (IS_QUANTIZED) scratch.digits.reserve(op.head_dim, scratch.padded);
    }

    // Computes all cuts of a unit. `next`: the unit whose keys are read after this one's, if it has a tile.
    void run(const AttentionUnit& unit, const AttentionUnit& next) {
        begin(unit, next);
        for_parts([&](int64_t) {
            gather_queries();
            begin_sums();
            results_ = CutResults::at(scratch_.results.data(), num_rows_, scratch_.padded);
            const int64_t end = visible_.end(*tile_);
            for (int64_t key = unit.first_key; key < end; key += CUT) {
                next_ = key + CUT < end ? cut_at(*tile_, head_, key + CUT) : after_;
                run_cut(cut_at(*tile_, head_, key));
                for (int row = 0; row < num_rows_; row++) merge(row);
            }
            write_results();
        });
    }

    // Computes the first cut of a unit, and leaves its results of all rows at a place, to be merged.
    void run_alone(const AttentionUnit& unit, const AttentionUnit& next, float* place) {
        begin(unit, next);
        for_parts([&](int64_t first_row) {
            gather_queries();
            results_ = CutResults::at(place, num_rows(*tile_), scratch_.padded, first_row);
            next_ = after_;
            run_cut(cut_at(*tile_, head_, unit.first_key));
        });
    }

    // Merges all cuts of a unit's tile and head, whose results lie at a place one behind the other.
    void merge_all(const AttentionUnit& unit, float* place, int64_t num_cuts) {
        begin(unit, {});
        for_parts([&](int64_t first_row) {
            begin_sums();
            for (int64_t cut = 0; cut < num_cuts; cut++) {
                float* results = place + cut * CutResults::num_floats(num_rows(*tile_), scratch_.padded);
                results_ = CutResults::at(results, num_rows(*tile_), scratch_.padded, first_row);
                for (int row = 0; row < num_rows_; row++) merge(row);
            }
            write_results();
        });
    }

   private:
    // Keys of a sequence that are worked on together, and the blocks in which they lie.
    struct Cut {
        int64_t head = 0, first_key = 0, num_keys = 0;
        const int32_t* blocks = nullptr;
        int64_t num_blocks = 0;
        // The first of them that no row sees, and that may be others': the one behind them is read in their place.
        int64_t num_hidden = 0;
    };

    void begin(const AttentionUnit& unit, const AttentionUnit& next) {
        tile_ = unit.tile;
        head_ = unit.head;
        after_ = next.tile ? cut_at(*next.tile, next.head, next.first_key) : Cut{};
    }

    int64_t num_rows(const AttentionTile& tile) const { return tile.num_tokens * group_; }

    // A group wider than the scratch goes in parts. `visit`: called with each part's first row among the tile's.
    template <class Visit>
    void for_parts(Visit visit) {
        for (int64_t first = 0; first < group_; first += MAX_ATTENTION_ROWS) {
            first_member_ = first;
            num_members_ = std::min<int64_t>(group_ - first, MAX_ATTENTION_ROWS);
            num_rows_ = (int)(tile_->num_tokens * num_members_);
            visit(tile_->num_tokens * first);
        }
    }

    int64_t count_hidden(const AttentionTile& tile, int64_t first_key) const {
        return op_.window ? std::max<int64_t>(0, tile.first_position - op_.window + 1 - first_key) / op_.block_size : 0;
    }

    Cut cut_at(const AttentionTile& tile, int64_t head, int64_t first_key) const {
        const int64_t size = op_.block_size;
        const int64_t num_keys = std::min<int64_t>(CUT, visible_.end(tile) - first_key);
        const int32_t* blocks = step_.blocks_of(tile.sequence, op_.kv_group) + first_key / size;
        return {head, first_key, num_keys, blocks, (num_keys + size - 1) / size, count_hidden(tile, first_key)};
    }

    // A sink is what a row has seen before its first key: a score of weight 1, of which there is no value.
    void begin_sums() {
        std::fill_n(scratch_.totals.data(), num_rows_ * scratch_.padded, 0.0f);
        std::fill_n(scratch_.maxima, num_rows_, -INFINITY_);
        std::fill_n(scratch_.sums, num_rows_, 0.0f);
        if (!op_.sinks) return;
        const float* sinks = op_.sinks + head_ * group_ + first_member_;
        for (int row = 0; row < num_rows_; row++)
            scratch_.maxima[row] = sinks[row % num_members_] * LOG2_OF_E, scratch_.sums[row] = 1;
    }

    void gather_queries() {
        for (int row = 0; row < num_rows_; row++) {
            const int64_t token = tile_->first_row + row / num_members_, member = first_member_ + row % num_members_;
            const E* source = (const E*)op_.input + token * op_.input_stride + (head_ * group_ + member) * op_.head_dim;
            if constexpr (IS_QUANTIZED) {
                DigitScratch& digits = scratch_.digits;
                uint8_t* upper = digits.queries.data() + 2 * row * digits.query_stride;
                Largest largest;
                visit_vectors(source, op_.head_dim, [&](int64_t, Floats x) { largest.see(x); });
                digits.query_scales[row] = split_row(
                    source, op_.head_dim, largest.value(), QUERY_LEVELS, QUERY_SHIFT, upper, upper + digits.query_stride);
            } else {
                memcpy(scratch_.query.data() + row * op_.head_dim, source, sizeof(E) * op_.head_dim);
            }
        }
        if constexpr (IS_QUANTIZED) {
            DigitScratch& digits = scratch_.digits;
            memset(digits.queries.data() + 2 * num_rows_ * digits.query_stride, 1, digits.query_stride);
        }
    }

    // The left sides of both products: rows of words that are so many words apart.
    struct Factors {
        const uint32_t* words;
        int64_t stride;
        int num_rows;
    };

    Factors query_factors() const {
        const DigitScratch& digits = scratch_.digits;
        if constexpr (IS_QUANTIZED) return {(const uint32_t*)digits.queries.data(), digits.query_stride / 4, 2 * num_rows_ + 1};
        return {(const uint32_t*)scratch_.query.data(), dim_words_, num_rows_};
    }

    Factors weight_factors() const {
        if constexpr (IS_QUANTIZED)
            return {(const uint32_t*)scratch_.digits.weights.data(), CUT / PER_WORD<S>, 2 * num_rows_ + NUM_UNUSED};
        return {(const uint32_t*)scratch_.weights.data(), CUT / PER_WORD<S>, num_rows_};
    }

    // The destinations of scores and products: a row of a product has the place of its factor's row.
    float* all_scores() const { return IS_QUANTIZED ? scratch_.digits.scores.data() : scratch_.scores.data(); }
    float* all_products() const { return IS_QUANTIZED ? scratch_.digits.products.data() : results_.products; }

    void run_cut(const Cut& cut) {
        // With one tile of rows, memory gives keys and values more slowly than they are multiplied, and lies in pieces too
        // short for the processor to see what comes: values are fetched while keys are read, and the next keys after.
        const bool streams =
            num_rows_ <= MAX_TILE_ROWS && op_.block_size % TILE_COLUMNS == 0 && op_.head_dim % TILE_COLUMNS == 0;
        if constexpr (IS_QUANTIZED) {
            find_blocks(cut);
            look_ahead(streams);
            gather_scales();
            run_cut<NO_LINES>(cut);
            join_products();
        } else {
            find_blocks(cut);
            streams ? run_cut<SAME_LINES>(cut) : run_cut<NO_LINES>(cut);
        }
    }

    template <int LINES>
    void run_cut(const Cut& cut) {
        if (op_.block_size < VL) gather_keys();
        const int num_queries = query_factors().num_rows, num_weights = weight_factors().num_rows;
        scores_of<LINES>(0, num_queries, cut.num_keys);
        for (int row = ROWS_AT_ONCE; row < num_queries; row += ROWS_AT_ONCE)
            scores_of<NO_LINES>(row, num_queries, cut.num_keys);
        for (int row = 0; row < num_rows_; row++) weigh(row, cut.first_key, cut.num_keys);
        const bool gathers = op_.head_dim % VL || value_run_ % PIECE_WORDS;
        if (gathers) gather_values();
        products_of<LINES>(0, num_weights, cut.num_keys);
        for (int row = ROWS_AT_ONCE; row < num_weights; row += ROWS_AT_ONCE)
            products_of<NO_LINES>(row, num_weights, cut.num_keys);
    }

    template <int LINES>
    INLINE void scores_of(int row, int end, int64_t num_keys) {
        const int num_rows = std::min(end - row, ROWS_AT_ONCE);
#if defined(HAS_TILES)
        if constexpr (ON_TILES<S>) return compute_scores_on_tiles<LINES>(num_rows, row, num_keys);
#endif
        choose_scores<LINES, ROWS_AT_ONCE>(num_rows, row, num_keys);
    }

    template <int LINES>
    INLINE void products_of(int row, int end, int64_t num_keys) {
        const int num_rows = std::min(end - row, ROWS_AT_ONCE);
#if defined(HAS_TILES)
        if constexpr (ON_TILES<S>) return compute_products_on_tiles<LINES>(num_rows, row, num_keys);
#endif
        choose_products<LINES, ROWS_AT_ONCE>(num_rows, row, num_keys);
    }

    // Finds where the words of keys and values lie, by runs that both products can read in whole vectors.
    void find_blocks(const Cut& cut) {
        num_blocks_ = (int)cut.num_blocks;
        for (int i = 0; i < num_blocks_; i++) {
            const int32_t block = cut.blocks[std::max<int64_t>(i, cut.num_hidden)];
            keys_[i] = (const uint32_t*)pool_.keys<S>(op_.pool, block, head_);
            values_[i] = (const uint32_t*)pool_.values<S>(op_.pool, block, head_);
        }
        key_run_ = op_.block_size;
        value_run_ = op_.block_size / PER_WORD<S>;
        value_stride_ = op_.head_dim;
    }

    // The scales of a block's keys or values lie behind these.
    const float* scales_behind(const uint32_t* tile) const { return (const float*)(tile + op_.block_size * dim_words_); }

    void gather_scales() {
        const int64_t size = op_.block_size;
        for (int i = 0; i < num_blocks_; i++) {
            copy_scales(scales_behind(keys_[i]), size, scratch_.digits.key_scales + i * size);
            copy_scales(scales_behind(values_[i]), size, scratch_.digits.value_scales + i * size);
        }
    }

    static INLINE void copy_scales(const float* scales, int64_t size, float* place) {
        if (size < VL) memcpy(place, scales, 4 * size);
        for (int64_t i = 0; i + VL <= size; i += VL) store(place + i, load(scales + i));
    }

    // Lists the values of this cut and the keys of the next one, and how many lines are fetched with each step of what is
    // computed. The shares are how long this takes, in microseconds of a processor with AMX.
    void look_ahead(bool streams) {
        ahead_.begin(pool_.tile);
        if (streams) {
            for (int i = 0; i < num_blocks_; i++) ahead_.add(values_[i]);
            for (int i = 0; i < next_.num_blocks; i++) {
                ahead_.add(pool_.template keys<S>(op_.pool, next_.blocks[i], next_.head));
                const auto* values = (const uint32_t*)pool_.template values<S>(op_.pool, next_.blocks[i], next_.head);
                _mm_prefetch((const char*)scales_behind(values), _MM_HINT_T1);
            }
        }
        constexpr float SCORES = 0.6f, WEIGHTS = 0.25f, VALUES = 0.25f, PRODUCTS = 0.4f;
        const float lines = (float)ahead_.size() / (SCORES + WEIGHTS * (float)num_rows_ + VALUES + PRODUCTS);
        ahead_of_tile_ = (int64_t)(lines * SCORES / (CUT / TILE_COLUMNS) + 1);
        ahead_of_vector_ = (int64_t)(lines * WEIGHTS / (CUT / VL) + 1);
        ahead_of_block_ = (int64_t)(lines * VALUES / (float)std::max(num_blocks_, 1) + 1);
        ahead_of_column_ = (int64_t)(lines * PRODUCTS * TILE_COLUMNS / (float)scratch_.padded + 1);
    }

    // Blocks shorter than a vector: their keys side by side, as if in one block of 256.
    void gather_keys() {
        const int64_t size = op_.block_size;
        scratch_.keys.resize(dim_words_ * CUT);
        uint32_t* all = scratch_.keys.data();
        for (int i = 0; i < num_blocks_; i++)
            for (int64_t d = 0; d < dim_words_; d++) memcpy(all + d * CUT + i * size, keys_[i] + d * size, 4 * size);
        keys_[0] = all;
        key_run_ = CUT;
    }

    // Values narrower than whole vectors, or of blocks with fewer words than are multiplied at once: rows side by side, as
    // if in one block of 256, padded with zeros past the head's dimensions.
    void gather_values() {
        const int64_t rows = op_.block_size / PER_WORD<S>, stride = scratch_.padded;
        scratch_.values.resize(CUT / PER_WORD<S> * stride);
        uint32_t* all = scratch_.values.data();
        for (int i = 0; i < num_blocks_; i++) {
            if constexpr (IS_QUANTIZED) ahead_.fetch(ahead_of_block_);
            uint32_t* place = all + i * rows * stride;
            for (int64_t row = 0; row < rows; row++, place += stride) {
                const uint32_t* values = values_[i] + row * op_.head_dim;
                int64_t d = 0;
                for (; d + VL <= op_.head_dim; d += VL) store_words(place + d, load_words(values + d));
                if (d == stride) continue;
                memcpy(place + d, values + d, 4 * (op_.head_dim - d));
                memset(place + op_.head_dim, 0, 4 * (stride - op_.head_dim));
            }
        }
        values_[0] = all;
        value_run_ = CUT / PER_WORD<S>;
        value_stride_ = stride;
    }

    template <int LINES, int R>
    INLINE void choose_scores(int num_rows, int row, int64_t num_keys) {
        if constexpr (R > 0) {
            if (num_rows == R)
                compute_scores<LINES, R>(row, num_keys);
            else
                choose_scores<LINES, R - 1>(num_rows, row, num_keys);
        }
    }

    template <int LINES, int R>
    __attribute__((noinline)) void compute_scores(int row, int64_t num_keys) {
        const Factors factors = query_factors();
        const uint32_t* left = factors.words + row * factors.stride;
        for (int64_t key = 0; key < num_keys; key += TILE_COLUMNS) {
            const int64_t next = key + VL < num_keys ? key + VL : key;
            if constexpr (IS_QUANTIZED) ahead_.fetch(ahead_of_tile_);
            Floats sums[R][2];
            UNROLL for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = zero();
            multiply<S, R, LINES>(
                sums, left, factors.stride, {key_words(key), key_words(next), key_run_}, dim_words_,
                LINES > 0 ? value_lines(key) : nullptr);
            UNROLL for (int r = 0; r < R; r++) {
                float* place = all_scores() + (row + r) * CUT + key;
                store(place, sums[r][0]);
                store(place + VL, sums[r][1]);
            }
        }
    }

    // Values of the keys of a tile: as many bytes as these have.
    INLINE const char* value_lines(int64_t key) const {
        return (const char*)(values_[key / op_.block_size] + key % op_.block_size / PER_WORD<S> * op_.head_dim);
    }

    // A share of the keys that are read next, as large as a block's values in a tile of columns; of none, those values.
    INLINE const char* next_lines(int64_t block, int64_t column, const uint32_t* values) const {
        if (block >= next_.num_blocks) return (const char*)values;
        const uint32_t* keys = (const uint32_t*)pool_.keys<S>(op_.pool, next_.blocks[block], next_.head);
        return (const char*)(keys + column * (op_.block_size / PER_WORD<S>));
    }

    INLINE const uint32_t* key_words(int64_t key) const { return keys_[key / key_run_] + key % key_run_; }

    // Turns a row's scores into weights, and takes their maximum and sum.
    void weigh(int row, int64_t first_key, int64_t num_keys) {
        const int64_t used = (num_keys + VL - 1) / VL * VL;
        if constexpr (IS_QUANTIZED) {
            DigitScratch& digits = scratch_.digits;
            float* scores = digits.scores.data() + 2 * row * CUT;
            const float* ones = digits.scores.data() + 2 * num_rows_ * CUT;
            const Floats scale = broadcast(digits.query_scales[row]);
            for (int64_t i = 0; i < used; i += VL) {
                const Floats sum = join_digits(load(scores + i), load(scores + CUT + i), load(ones + i));
                store(scores + i, mul(mul(sum, scale), load(digits.key_scales + i)));
            }
            // The weights overwrite the scores of the lower digits, which are no longer needed.
            float* weights = scores + CUT;
            Largest largest;
            weigh_scores(row, first_key, num_keys, scores, weights, largest);
            uint8_t* upper = digits.weights.data() + 2 * row * CUT;
            digits.weight_scales[row] = split_row(weights, used, largest.value(), WEIGHT_LEVELS, 0, upper, upper + CUT);
        } else {
            Largest unused;
            float* scores = scratch_.scores.data() + row * CUT;
            weigh_scores(row, first_key, num_keys, scores, scratch_.weights.data() + row * CUT, unused);
        }
    }

    // Makes numbers of a row's sums of integers.
    void join_products() {
        const DigitScratch& digits = scratch_.digits;
        for (int row = 0; row < num_rows_; row++) {
            const float* upper = digits.products.data() + 2 * row * scratch_.padded;
            const Floats scale = broadcast(digits.weight_scales[row]);
            for (int64_t i = 0; i < scratch_.padded; i += VL) {
                const Floats sum = join_digits(load(upper + i), load(upper + scratch_.padded + i), zero());
                store(results_.products + row * scratch_.padded + i, mul(sum, scale));
            }
        }
    }

    // `weights`: of a quantized pool times the values' scales, and shown to `largest`.
    template <class T>
    void weigh_scores(int row, int64_t first_key, int64_t num_keys, float* scores, T* weights, Largest& largest) {
        const int64_t position = tile_->first_position + row / num_members_;
        const int64_t end = std::min<int64_t>(visible_.end(tile_->sequence, position) - first_key, num_keys);
        const int64_t begin = op_.window ? std::max<int64_t>(0, position - op_.window + 1 - first_key) : 0;
        const int64_t used = (num_keys + VL - 1) / VL * VL;
        results_.maxima[row] = -INFINITY_;
        results_.sums[row] = 0;
        if (begin >= end) {
            for (int64_t i = 0; i < used; i += VL) store(weights + i, zero());
            return;
        }
        // Vectors [first, last) hold a key that the row sees, [inner, outer) nothing else.
        const int64_t first = begin / VL * VL, last = (end + VL - 1) / VL * VL;
        const int64_t inner = (begin + VL - 1) / VL * VL, outer = end / VL * VL;
        if (op_.softcap) cap(scores, first, last);
        const Floats lowest = broadcast(-INFINITY_);
        Floats most = lowest;
        for (int64_t i = first; i < last; i += VL)
            most = max(most, i >= inner && i < outer ? load(scores + i) : seen(load(scores + i), i, begin, end, lowest));
        // Exponentials are powers of two, so that a score needs no other factor.
        float maximum = max_lanes(most) * scale_;
        // A maximum may pass over what is not a number, which then is the weight's, and so the sum's; but for this one.
        if (maximum == -INFINITY_) {
            if (only_lowest(scores, begin, end)) {
                for (int64_t i = 0; i < used; i += VL) store(weights + i, zero());
                return;
            }
            maximum = std::numeric_limits<float>::quiet_NaN();
        }
        const Floats scale = broadcast(scale_), shift = broadcast(-maximum);
        Floats sum = zero();
        for (int64_t i = 0; i < used; i += VL) {
            if (i < first || i >= last) {
                store(weights + i, zero());
                continue;
            }
            Floats weight = power_of_two<E>(fma(load(scores + i), scale, shift));
            const bool is_edge = i < inner || i >= outer;
            if constexpr (IS_QUANTIZED) ahead_.fetch(ahead_of_vector_);
            if (is_edge) weight = seen(weight, i, begin, end, zero());
            sum = add(sum, weight);
            if constexpr (IS_QUANTIZED) {
                weight = mul(weight, load(scratch_.digits.value_scales + i));
                if (is_edge) weight = seen(weight, i, begin, end, zero());
                largest.see(weight);
            }
            store(weights + i, weight);
        }
        results_.maxima[row] = maximum;
        results_.sums[row] = add_lanes(sum);
    }

    // The factor that remains, the softcap itself, is part of `scale_`.
    __attribute__((noinline)) void cap(float* scores, int64_t first, int64_t last) const {
        const Floats factor = broadcast(op_.scale / op_.softcap);
        for (int64_t i = first; i < last; i += VL) store(scores + i, hyperbolic_tangent(mul(load(scores + i), factor)));
    }

    static bool only_lowest(const float* scores, int64_t begin, int64_t end) {
        return std::all_of(scores + begin, scores + end, [](float score) { return score == -INFINITY_; });
    }

    // Keeps the lanes of keys [begin, end) out of those from `first` on.
    static INLINE Floats seen(Floats x, int64_t first, int64_t begin, int64_t end, Floats otherwise) {
        if (first + VL > end) x = select(first_lanes((int)std::max<int64_t>(end - first, 0)), otherwise, x);
        if (first < begin) x = select(first_lanes((int)std::min<int64_t>(begin - first, VL)), x, otherwise);
        return x;
    }

    template <int LINES, int R>
    INLINE void choose_products(int num_rows, int row, int64_t num_keys) {
        if constexpr (R > 0) {
            if (num_rows == R)
                compute_products<LINES, R>(row, num_keys);
            else
                choose_products<LINES, R - 1>(num_rows, row, num_keys);
        }
    }

    template <int LINES, int R>
    __attribute__((noinline)) void compute_products(int row, int64_t num_keys) {
        const Factors factors = weight_factors();
        const uint32_t* left = factors.words + row * factors.stride;
        const int64_t num_words = words_of<S>(num_keys);
        for (int64_t column = 0; column < scratch_.padded; column += TILE_COLUMNS) {
            const int64_t next = column + VL < scratch_.padded ? VL : 0;
            if constexpr (IS_QUANTIZED) ahead_.fetch(ahead_of_column_);
            Floats sums[R][2];
            UNROLL for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = zero();
            for (int64_t word = 0, block = 0; word < num_words; word += value_run_, block++) {
                const uint32_t* right = values_[block] + column;
                multiply<S, R, LINES>(
                    sums, left + word, factors.stride, {right, right + next, value_stride_}, std::min(value_run_, num_words - word),
                    LINES > 0 ? next_lines(block, column, right) : nullptr);
            }
            UNROLL for (int r = 0; r < R; r++) {
                float* place = all_products() + (row + r) * scratch_.padded + column;
                store(place, sums[r][0]);
                if (next) store(place + VL, sums[r][1]);
            }
        }
    }

#if defined(HAS_TILES)
    template <int LINES>
    void compute_scores_on_tiles(int num_rows, int row, int64_t num_keys) {
        const Factors factors = query_factors();
        const uint32_t* left = factors.words + row * factors.stride;
        for (int64_t key = 0; key < num_keys; key += TILE_COLUMNS) {
            const int64_t next = key + VL < num_keys ? key + VL : key;
            if constexpr (IS_QUANTIZED) ahead_.fetch(ahead_of_tile_);
            product_.fetch(LINES > 0 ? value_lines(key) : nullptr);
            product_.begin(num_rows);
            product_.template add<S>(left, factors.stride, {key_words(key), key_words(next), key_run_}, dim_words_);
            product_.store(all_scores() + row * CUT + key, CUT);
        }
    }

    template <int LINES>
    void compute_products_on_tiles(int num_rows, int row, int64_t num_keys) {
        const Factors factors = weight_factors();
        const uint32_t* left = factors.words + row * factors.stride;
        const int64_t num_words = words_of<S>(num_keys);
        alignas(64) float sums[BLOCK_ROWS][TILE_COLUMNS];
        for (int64_t column = 0; column < scratch_.padded; column += TILE_COLUMNS) {
            const int64_t next = column + VL < scratch_.padded ? VL : 0;
            if constexpr (IS_QUANTIZED) ahead_.fetch(ahead_of_column_);
            product_.begin(num_rows);
            for (int64_t word = 0, block = 0; word < num_words; word += value_run_, block++) {
                const uint32_t* right = values_[block] + column;
                product_.fetch(LINES > 0 ? next_lines(block, column, right) : nullptr);
                product_.template add<S>(
                    left + word, factors.stride, {right, right + next, value_stride_}, std::min(value_run_, num_words - word));
            }
            float* place = all_products() + row * scratch_.padded + column;
            if (next) {
                product_.store(place, scratch_.padded);
                continue;
            }
            product_.store(sums, TILE_COLUMNS);
            for (int r = 0; r < num_rows; r++) ::store(place + r * scratch_.padded, load(sums[r]));
        }
    }

    TileProduct<> product_;
#endif

    void merge(int row) {
        const float before = scratch_.maxima[row], here = results_.maxima[row];
        if (here == -INFINITY_) return;
        const float maximum = before > here ? before : here;
        const float keep = before == -INFINITY_ ? 0.0f : one_power(before - maximum), take = one_power(here - maximum);
        scratch_.maxima[row] = maximum;
        scratch_.sums[row] = scratch_.sums[row] * keep + results_.sums[row] * take;
        float* total = scratch_.totals.data() + row * scratch_.padded;
        const float* product = results_.products + row * scratch_.padded;
        const Floats old = broadcast(keep), fresh = broadcast(take);
        for (int64_t i = 0; i < scratch_.padded; i += VL)
            store(total + i, fma(load(product + i), fresh, mul(load(total + i), old)));
    }

    static float one_power(float x) {
        float lanes[VL];
        store(lanes, power_of_two<float>(broadcast(x)));
        return lanes[0];
    }

    void write_results() {
        for (int row = 0; row < num_rows_; row++) {
            const int64_t token = tile_->first_row + row / num_members_, member = first_member_ + row % num_members_;
            E* place = (E*)op_.output + token * op_.num_heads * op_.head_dim + (head_ * group_ + member) * op_.head_dim;
            const float* total = scratch_.totals.data() + row * scratch_.padded;
            // No sum is 0, unless all scores are the lowest there is: then there is no result, and none is made up.
            const Floats sum = broadcast(scratch_.sums[row]);
            for (int64_t i = 0; i < op_.head_dim; i += VL)
                store(place + i, div(load(total + i), sum), (int)std::min<int64_t>(VL, op_.head_dim - i));
        }
    }

#if defined(HAS_TILES)
    // Unused rows of the products with quantized values. These have as many rows as the products with keys, since setting
    // tiles up for another number takes longer than the unused rows do.
    static constexpr int NUM_UNUSED = ON_TILES<S> ? 1 : 0;
    static constexpr int ROWS_AT_ONCE = ON_TILES<S> ? BLOCK_ROWS : MAX_TILE_ROWS;
    static constexpr int64_t PIECE_WORDS = ON_TILES<S> ? TILE_WORDS : 1;
#else
    static constexpr int NUM_UNUSED = 0;
    static constexpr int ROWS_AT_ONCE = MAX_TILE_ROWS;
    static constexpr int64_t PIECE_WORDS = 1;
#endif
    static constexpr bool IS_QUANTIZED = !std::is_same_v<E, S>;
    static constexpr float INFINITY_ = std::numeric_limits<float>::infinity();

    const Op& op_;
    const Step& step_;
    const VisibleKeys visible_;
    const PoolShape pool_;
    AttentionScratch<E>& scratch_;
    const int64_t group_, dim_words_;
    // Makes the scores in the scratch exponents of two.
    const float scale_;
    const AttentionTile* tile_ = nullptr;
    int64_t head_ = 0, first_member_ = 0, num_members_ = 0;
    // The cut that is read after the current one, and the first of the next unit.
    Cut next_, after_;
    CutResults results_ = {};
    // The lines of a quantized pool that are fetched next, and how many of them each part of the computation fetches.
    LinesAhead ahead_;
    int64_t ahead_of_tile_ = 0, ahead_of_vector_ = 0, ahead_of_block_ = 0, ahead_of_column_ = 0;
    int num_rows_ = 0, num_blocks_ = 0;
    int64_t key_run_ = 0, value_run_ = 0, value_stride_ = 0;
    const uint32_t* keys_[CUT / 8];
    const uint32_t* values_[CUT / 8];
};
