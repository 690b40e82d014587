// The first process of the emulated machine: runs the kernels on tiles, against their arithmetic spelled out.
//
// Prints a line for each check and, last, the verdict.
#include <dlfcn.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <atomic>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "amx.h"
#include "plan.h"

namespace {

using Bits = std::vector<uint32_t>;
using Random = std::mt19937;

bool all_passed = true;

void check(bool passed, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    printf(passed ? "ok      " : "FAILED  ");
    vprintf(format, arguments);
    printf("\n");
    fflush(stdout);
    va_end(arguments);
    all_passed = all_passed && passed;
}

// How the values of both sides are chosen, as pairs of bfloat16 in a word.
struct Values {
    const char* name;
    uint16_t (*choose)(Random&);
};

uint16_t power_of_two(int exponent, bool negative) { return (uint16_t)(negative << 15 | (exponent + 127) << 7); }
uint16_t number(Random& random, int least_exponent, int most_exponent) {
    const int exponent = least_exponent + (int)(random() % (most_exponent - least_exponent + 1));
    return power_of_two(exponent, random() & 1) | (random() & 0x7f);
}

const Values VALUES[] = {
    {"around one", [](Random& random) { return number(random, -4, 4); }},
    {"of any size", [](Random& random) { return number(random, -126, 127); }},
    {"whose sums are huge", [](Random& random) { return number(random, 60, 63); }},
    {"whose sums are denormal", [](Random& random) { return number(random, -75, -63); }},
    // Sums just below the smallest normal number, which rounding may or may not reach.
    {"on the edge of the denormals",
     [](Random& random) {
         const int exponents[] = {-63, -63, -75, -74};
         return power_of_two(exponents[random() % 4], random() & 1);
     }},
    {"that are denormal", [](Random& random) { return random() % 2 ? number(random, 0, 100) : (uint16_t)(random() & 0x807f); }},
    {"of any bits", [](Random& random) { return (uint16_t)random(); }},
};

Bits random_words(Random& random, int64_t count, const Values& values) {
    Bits words(count);
    for (auto& word : words) word = values.choose(random) | (uint32_t)values.choose(random) << 16;
    return words;
}

bool is_nan(uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }

// Compares bits; all that are not numbers are alike, since which of several goes on is nobody's promise.
template <class E>
int64_t num_different(const Bits& a, const Bits& b) {
    int64_t count = 0;
    for (size_t i = 0; i < a.size(); i++) count += a[i] != b[i] && !(sizeof(E) == 2 && is_nan(a[i]) && is_nan(b[i]));
    return count;
}

template <class E, class T>
Bits product(TileProduct<T>& tiles, const Bits& left, const Bits& right, int rows, int64_t words) {
    Bits sums(rows * TILE_COLUMNS);
    tiles.template compute<E>(left.data(), words, rows, right.data(), words, sums.data());
    return sums;
}

template <class E>
void check_products(const char* type, const Values& values) {
    Random random(1);
    TileProduct<HardwareTiles> tiles;
    TileProduct<EmulatedTiles> emulated;
    int64_t different = 0, compared = 0, not_numbers = 0;
    for (int64_t words : {1, 15, 16, 17, 40})
        for (int rows = 1; rows <= BLOCK_ROWS; rows++) {
            const Bits left = random_words(random, rows * words, values);
            const Bits right = random_words(random, words * TILE_COLUMNS, values);
            const Bits sums = product<E>(tiles, left, right, rows, words);
            different += num_different<E>(sums, product<E>(emulated, left, right, rows, words));
            compared += (int64_t)sums.size();
            if (sizeof(E) == 2)
                for (uint32_t bits : sums) not_numbers += is_nan(bits);
        }
    check(!different, "%s, values %s: %ld of %ld differ, %ld are not numbers", type, values.name, different, compared, not_numbers);
}

// The parts of the extended state that the processor has to save: XINUSE.
bool holds_tiles() {
    uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
    return low >> 17 & 3;
}

void check_refusal() {
    const pid_t child = fork();
    if (!child) {
        HardwareTiles tiles;
        tiles.configure(TileShapes::of(1, 0));
        tiles.clear<SUM00>();
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    check(WIFSIGNALED(status) && WTERMSIG(status) == SIGILL, "a process that has not asked may not use tiles");
}

void check_release() {
    Random random(2);
    const Bits left = random_words(random, 32 * 16, VALUES[0]), right = random_words(random, 16 * 32, VALUES[0]);
    bool held;
    {
        TileProduct<HardwareTiles> tiles;
        product<bf16>(tiles, left, right, 32, 16);
        held = holds_tiles();
    }
    check(held && !holds_tiles(), "a product holds tiles until it goes");
}

std::atomic<int64_t> num_signals{0};
std::atomic<int> num_running{2};

// Multiplies until the thread was interrupted often: every thread its own values and shapes.
void multiply_until_interrupted(int thread, int64_t& different, int64_t& products) {
    constexpr int OFTEN = 5;
    Random random(thread);
    const int rows = 1 + 16 * thread;
    const int64_t words = 400;
    const Bits left = random_words(random, rows * words, VALUES[0]);
    const Bits right = random_words(random, words * TILE_COLUMNS, VALUES[0]);
    TileProduct<EmulatedTiles> emulated;
    const Bits expected = product<bf16>(emulated, left, right, rows, words);
    TileProduct<HardwareTiles> tiles;
    rusage usage;
    do {
        different += num_different<bf16>(product<bf16>(tiles, left, right, rows, words), expected);
        products++;
        getrusage(RUSAGE_THREAD, &usage);
    } while (usage.ru_nivcsw < OFTEN);
    num_running--;
}

// Two threads multiply while a third, which has no tiles, sends them signals: the system keeps each one's tiles while
// another runs, and under the handler of a signal.
void check_threads() {
    signal(SIGUSR1, [](int) { num_signals++; });
    int64_t different[2] = {}, products[2] = {};
    std::thread first([&] { multiply_until_interrupted(0, different[0], products[0]); });
    std::thread second([&] { multiply_until_interrupted(1, different[1], products[1]); });
    bool held = false;
    std::thread without([&] {
        while (num_running) {
            for (auto* thread : {&first, &second}) pthread_kill(thread->native_handle(), SIGUSR1);
            held = held || holds_tiles();
        }
    });
    without.join(), first.join(), second.join();
    check(
        !different[0] && !different[1], "threads that interrupt each other: %ld and %ld outputs of %ld and %ld products differ",
        different[0], different[1], products[0], products[1]);
    check(num_signals > 0, "and got %ld signals", (long)num_signals);
    check(!held, "a thread without tiles has none");
}

// The surface of a library, in one executor of two threads.
class Library {
   public:
    explicit Library(const char* path) : handle_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
        if (!handle_) printf("%s\n", dlerror());
        executor_ = find<void*(int32_t)>("blockyard_create")(2);
    }
    ~Library() { find<void(void*)>("blockyard_destroy")(executor_); }
    bool ready() const { return executor_; }

    // A linear layer over rows of bfloat16 -> [rows, outputs] as floats.
    Bits linear(Scheme scheme, std::vector<uint16_t>& input, std::vector<uint16_t>& weight, int64_t rows, int64_t width, int64_t outputs) {
        const int64_t num_panels = (outputs + TILE_COLUMNS - 1) / TILE_COLUMNS;
        std::vector<const void*> columns(num_panels * TILE_COLUMNS);
        for (int64_t n = 0; n < outputs; n++) columns[n] = &weight[n * width];
        Bits packed(columns.size() * width), sums(rows * outputs);
        std::vector<float> scales(columns.size());
        std::vector<int32_t> totals(columns.size());
        if (scheme == INT8)
            find<void(
                void*, const void* const*, int64_t, int64_t, int32_t, int32_t, void*, float*, int32_t*)>(
                "blockyard_pack_int8")(
                executor_, columns.data(), num_panels, width, BFLOAT16, 1, packed.data(), scales.data(), totals.data());
        else
            find<void(void*, const void* const*, int64_t, int64_t, void*)>("blockyard_pack")(
                executor_, columns.data(), num_panels, width / 2, packed.data());
        Op op{};
        op.kind = LINEAR, op.type = BFLOAT16, op.wide = 1, op.scheme = scheme, op.leaves = 1;
        op.input = input.data(), op.output = sums.data(), op.weight = packed.data();
        op.scales = scales.data(), op.sums = totals.data();
        op.in_features = op.input_stride = width, op.out_features = outputs;
        std::vector<int64_t> positions(rows);
        Inputs inputs{};
        inputs.num_sequences = 1, inputs.num_new_tokens = inputs.seq_lens = &rows, inputs.positions = positions.data();
        find<void(void*, const Op*, int32_t, const Inputs*)>("blockyard_run")(executor_, &op, 1, &inputs);
        return sums;
    }

   private:
    template <class Function>
    Function* find(const char* name) const {
        return (Function*)dlsym(handle_, name);
    }

    void* handle_;
    void* executor_;
};

void check_library() {
    Library tiles("/amx.so"), emulated("/amx_emulated.so");
    check(tiles.ready() && emulated.ready(), "both libraries make an executor");
    for (Scheme scheme : {UNQUANTIZED, INT8}) {
        Random random(3);
        int64_t different = 0, compared = 0;
        for (int64_t rows : {1, 2, 16, 17, 33, 70, 200})
            for (int64_t width : {64, 100, 326}) {
                const int64_t outputs = 80;
                std::vector<uint16_t> input(rows * width), weight(outputs * width);
                for (auto& value : input) value = number(random, -4, 4);
                for (auto& value : weight) value = number(random, -4, 4);
                const Bits sums = tiles.linear(scheme, input, weight, rows, width, outputs);
                different += num_different<bf16>(sums, emulated.linear(scheme, input, weight, rows, width, outputs));
                compared += (int64_t)sums.size();
            }
        check(!different, "linear layers in %s: %ld of %ld differ", scheme == INT8 ? "int8" : "bfloat16", different, compared);
    }
}

}  // namespace

int main() {
    check_refusal();
    check(request_tiles(), "the system gives tiles to a process that asks");
    for (const auto& values : VALUES) check_products<bf16>("bfloat16", values);
    check_products<int8_t>("int8", VALUES[6]);
    check_release();
    check_threads();
    check_library();
    printf("verdict: %s\n", all_passed ? "passed" : "FAILED");
    fflush(stdout);
    // The first process may not end.
    while (true) pause();
}
