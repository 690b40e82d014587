// Products on AMX's tile registers, and the same arithmetic spelled out for processors that have none.
//
// A block is up to 32 rows by one panel of 32 columns: eight tiles, four of them sums. The inner dimension goes in
// pieces of 16 words from its beginning, the last one filled with zeros, so that an output's bits depend on neither the
// number of rows nor their place. Rows of 16 and fewer use tiles of so many rows. Only with AVX512 beside it.
#pragma once

#include "tile.h"

#if defined(BLOCKYARD_AMX) || defined(BLOCKYARD_EMULATED_AMX)
#define HAS_TILES 1

#include <sys/syscall.h>
#include <unistd.h>

constexpr int TILE_ROWS = 16, TILE_WORDS = 16, BLOCK_ROWS = 2 * TILE_ROWS, NUM_TILES = 8;
// Which tile holds what: sums of the first and of the second rows by both halves of a panel; rows; halves of a panel.
enum TileName { SUM00, SUM01, SUM10, SUM11, ROWS0, ROWS1, HALF0, HALF1 };

// The rows of every tile, each of 64 bytes.
struct TileShapes {
    int rows[NUM_TILES];

    static TileShapes of(int first_rows, int second_rows) {
        const int second = second_rows ? second_rows : 1;
        return {{first_rows, first_rows, second, second, first_rows, second, TILE_WORDS, TILE_WORDS}};
    }
};

// TDPBF16PS and TDPBUSD as the instruction manual defines them. All tiles have 64 bytes a row.
class EmulatedTiles {
   public:
    void configure(const TileShapes& shapes) {
        shapes_ = shapes;
        memset(words_, 0, sizeof words_);
    }
    void release() {}

    template <int T>
    void clear() {
        memset(words_[T], 0, sizeof words_[T]);
    }
    template <int T>
    void load(const void* place, int64_t stride_bytes) {
        for (int row = 0; row < shapes_.rows[T]; row++)
            memcpy(words_[T][row], (const char*)place + row * stride_bytes, sizeof words_[T][row]);
    }
    template <int T>
    void store(void* place, int64_t stride_bytes) const {
        for (int row = 0; row < shapes_.rows[T]; row++)
            memcpy((char*)place + row * stride_bytes, words_[T][row], sizeof words_[T][row]);
    }

    // Even and odd products are summed apart, from zero; both sums are added, then added to what was there.
    template <class E, int SUM, int LEFT, int RIGHT>
    void multiply() {
        const FlushDenormals flushing;
        for (int row = 0; row < shapes_.rows[LEFT]; row++) {
            if constexpr (sizeof(E) == 2) {
                const Words high = _mm512_set1_epi32((int)0xffff0000);
                Floats even = zero(), odd = zero();
                for (int k = 0; k < TILE_WORDS; k++) {
                    const Words a = broadcast_word(words_[LEFT][row][k]), b = load_words(words_[RIGHT][k]);
                    even = fma(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), even);
                    odd = fma(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), odd);
                }
                float* sums = (float*)words_[SUM][row];
                ::store(sums, add(::load(sums), add(even, odd)));
            } else {
                int32_t* sums = (int32_t*)words_[SUM][row];
                for (int k = 0; k < TILE_WORDS; k++) {
                    const uint8_t* a = (const uint8_t*)&words_[LEFT][row][k];
                    for (int column = 0; column < TILE_ROWS; column++) {
                        const int8_t* b = (const int8_t*)&words_[RIGHT][k][column];
                        for (int i = 0; i < 4; i++) sums[column] += (int32_t)a[i] * b[i];
                    }
                }
            }
        }
    }

   private:
    // Has the thread take denormals for zeros and write zeros for them, while it lives. What is denormal before it is
    // rounded counts: zeroed afterwards, a number that rounding brings up to a normal one would stay.
    class FlushDenormals {
       public:
        FlushDenormals() : before_(_mm_getcsr()) {
            _mm_setcsr(0x9fc0);
            asm volatile("" ::: "memory");  // Nothing is read, hence multiplied, before.
        }
        ~FlushDenormals() {
            asm volatile("" ::: "memory");
            _mm_setcsr(before_);
        }

       private:
        const unsigned before_;
    };

    TileShapes shapes_;
    alignas(64) uint32_t words_[NUM_TILES][TILE_ROWS][TILE_WORDS];
};

#if defined(BLOCKYARD_AMX)

// The processor's own tiles. Written as assembly: GCC 12's intrinsics tell the compiler neither of the 64 bytes of a
// configuration nor of the memory that a tile is loaded from, and it drops what was stored there before.
class HardwareTiles {
   public:
    void configure(const TileShapes& shapes) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } configuration;
        for (int tile = 0; tile < NUM_TILES; tile++) {
            configuration.rows[tile] = (uint8_t)shapes.rows[tile];
            configuration.row_bytes[tile] = 4 * TILE_WORDS;
        }
        asm volatile("ldtilecfg %0" ::"m"(configuration) : "memory");
    }
    void release() { asm volatile("tilerelease" ::: "memory"); }

#define FOR_TILE(T, INSTRUCTION, ...)                                                     \
    if constexpr (T == 0) asm volatile(INSTRUCTION("0") __VA_ARGS__);                     \
    else if constexpr (T == 1) asm volatile(INSTRUCTION("1") __VA_ARGS__);                \
    else if constexpr (T == 2) asm volatile(INSTRUCTION("2") __VA_ARGS__);                \
    else if constexpr (T == 3) asm volatile(INSTRUCTION("3") __VA_ARGS__);                \
    else if constexpr (T == 4) asm volatile(INSTRUCTION("4") __VA_ARGS__);                \
    else if constexpr (T == 5) asm volatile(INSTRUCTION("5") __VA_ARGS__);                \
    else if constexpr (T == 6) asm volatile(INSTRUCTION("6") __VA_ARGS__);                \
    else asm volatile(INSTRUCTION("7") __VA_ARGS__)
#define TILE_ZERO(T) "tilezero %%tmm" T
#define TILE_LOAD(T) "tileloadd (%0,%1,1), %%tmm" T
#define TILE_STORE(T) "tilestored %%tmm" T ", (%0,%1,1)"

    template <int T>
    INLINE void clear() {
        FOR_TILE(T, TILE_ZERO, ::: "memory");
    }
    template <int T>
    INLINE void load(const void* place, int64_t stride_bytes) {
        FOR_TILE(T, TILE_LOAD, ::"r"(place), "r"(stride_bytes) : "memory");
    }
    template <int T>
    INLINE void store(void* place, int64_t stride_bytes) const {
        FOR_TILE(T, TILE_STORE, ::"r"(place), "r"(stride_bytes) : "memory");
    }

#define TILE_DOT(NAME, SUM, LEFT, RIGHT) asm volatile(NAME " %%tmm" #RIGHT ", %%tmm" #LEFT ", %%tmm" #SUM ::: "memory")
    template <class E, int SUM, int LEFT, int RIGHT>
    INLINE void multiply() {
        static_assert(SUM == (LEFT - ROWS0) * 2 + RIGHT - HALF0, "a sum has its rows and its half");
        if constexpr (sizeof(E) == 2) {
            if constexpr (SUM == SUM00) TILE_DOT("tdpbf16ps", 0, 4, 6);
            if constexpr (SUM == SUM01) TILE_DOT("tdpbf16ps", 1, 4, 7);
            if constexpr (SUM == SUM10) TILE_DOT("tdpbf16ps", 2, 5, 6);
            if constexpr (SUM == SUM11) TILE_DOT("tdpbf16ps", 3, 5, 7);
        } else {
            if constexpr (SUM == SUM00) TILE_DOT("tdpbusd", 0, 4, 6);
            if constexpr (SUM == SUM01) TILE_DOT("tdpbusd", 1, 4, 7);
            if constexpr (SUM == SUM10) TILE_DOT("tdpbusd", 2, 5, 6);
            if constexpr (SUM == SUM11) TILE_DOT("tdpbusd", 3, 5, 7);
        }
    }
#undef TILE_DOT
#undef TILE_STORE
#undef TILE_LOAD
#undef TILE_ZERO
#undef FOR_TILE
};

using Tiles = HardwareTiles;

// Linux gives a process tiles when it asks, once.
inline bool request_tiles() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

#else

using Tiles = EmulatedTiles;

inline bool request_tiles() { return true; }

#endif

// Whether products of a type with a packed weight are made on tiles.
template <class E>
constexpr bool ON_TILES = sizeof(E) < 4;

// The sums of up to 32 rows by two vectors of columns. Holds the tiles of its thread, and gives them back when it goes.
template <class T = Tiles>
class TileProduct {
   public:
    ~TileProduct() {
        if (rows_) tiles_.release();
    }

    // Lets the next products fetch memory that will be needed soon into the second cache: as many bytes as they read of
    // the right side. Null: they fetch nothing.
    void fetch(const char* place) { next_ = place; }

    // Writes sums [rows][32]: of `rows` rows of words by the words of a panel.
    template <class E>
    void compute(const uint32_t* left, int64_t left_stride, int rows, const uint32_t* right, int64_t words, uint32_t* sums) {
        begin(rows);
        add<E>(left, left_stride, {right, right + VL, TILE_COLUMNS}, words);
        store(sums, TILE_COLUMNS);
    }

    // Begins sums of so many rows.
    void begin(int rows) {
        if (rows != rows_) {
            tiles_.configure(TileShapes::of(std::min(rows, TILE_ROWS), std::max(0, rows - TILE_ROWS)));
            rows_ = rows;
        }
        tiles_.template clear<SUM00>(), tiles_.template clear<SUM01>();
        if (rows > TILE_ROWS) tiles_.template clear<SUM10>(), tiles_.template clear<SUM11>();
    }

    // Adds the products of so many words. All runs of words but the last one have to be multiples of 16.
    template <class E>
    void add(const uint32_t* left, int64_t left_stride, Right right, int64_t words) {
        if (rows_ > TILE_ROWS)
            add<E, true>(left, left_stride, right, words);
        else
            add<E, false>(left, left_stride, right, words);
    }

    // Writes what was summed, to rows that are `stride` words apart: the second vector of columns behind the first.
    void store(void* sums, int64_t stride) const {
        uint32_t* place = (uint32_t*)sums;
        tiles_.template store<SUM00>(place, 4 * stride), tiles_.template store<SUM01>(place + VL, 4 * stride);
        if (rows_ <= TILE_ROWS) return;
        place += TILE_ROWS * stride;
        tiles_.template store<SUM10>(place, 4 * stride), tiles_.template store<SUM11>(place + VL, 4 * stride);
    }

   private:
    template <class E, bool TWO>
    void add(const uint32_t* left, int64_t left_stride, Right right, int64_t words) {
        const int64_t whole = words / TILE_WORDS * TILE_WORDS;
        for (int64_t k = 0; k < whole; k += TILE_WORDS)
            add_piece<E, TWO>(
                left + k, left_stride, {right.first + k * right.stride, right.second + k * right.stride, right.stride});
        if (whole == words) return;
        alignas(64) uint32_t last_left[BLOCK_ROWS][TILE_WORDS] = {}, last_right[TILE_WORDS][TILE_COLUMNS] = {};
        for (int row = 0; row < rows_; row++) memcpy(last_left[row], left + row * left_stride + whole, 4 * (words - whole));
        for (int64_t k = whole; k < words; k++) {
            store_words(last_right[k - whole], load_words(right.first + k * right.stride));
            store_words(last_right[k - whole] + VL, load_words(right.second + k * right.stride));
        }
        add_piece<E, TWO>(last_left[0], TILE_WORDS, {last_right[0], last_right[0] + VL, TILE_COLUMNS});
    }

    template <class E, bool TWO>
    INLINE void add_piece(const uint32_t* left, int64_t left_stride, Right right) {
        if (next_) {
            constexpr int64_t PIECE_BYTES = TILE_WORDS * TILE_COLUMNS * 4;
            UNROLL for (int64_t line = 0; line < PIECE_BYTES; line += LINE_BYTES) _mm_prefetch(next_ + line, _MM_HINT_T1);
            next_ += PIECE_BYTES;
        }
        tiles_.template load<HALF0>(right.first, 4 * right.stride);
        tiles_.template load<HALF1>(right.second, 4 * right.stride);
        tiles_.template load<ROWS0>(left, 4 * left_stride);
        tiles_.template multiply<E, SUM00, ROWS0, HALF0>();
        tiles_.template multiply<E, SUM01, ROWS0, HALF1>();
        if constexpr (TWO) {
            tiles_.template load<ROWS1>(left + TILE_ROWS * left_stride, 4 * left_stride);
            tiles_.template multiply<E, SUM10, ROWS1, HALF0>();
            tiles_.template multiply<E, SUM11, ROWS1, HALF1>();
        }
    }

    T tiles_;
    int rows_ = 0;
    const char* next_ = nullptr;
};

#endif
