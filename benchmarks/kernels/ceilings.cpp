// Loops that do one thing as fast as the processor can: read memory, or multiply within registers. See ceilings.py.
//
// Each function runs `num_threads` threads, each fixed to a processor, and writes the seconds of `num_passes` passes,
// from the moment when all threads begin to the moment when the last one ends.

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr std::size_t kVectorBytes = 64;
#elif defined(__AVX__)
constexpr std::size_t kVectorBytes = 32;
#else
constexpr std::size_t kVectorBytes = 8;
#endif
typedef std::int64_t Words __attribute__((vector_size(kVectorBytes), may_alias));

// Twelve chains hide the latency of every instruction measured here.
constexpr int kChains = 12;
constexpr std::size_t kHugePage = std::size_t{1} << 21;
// Small numbers, not zero, as bfloat16 and as bytes: processors may be faster with zeros.
constexpr std::int64_t kOperands = 0x3c123c343c563c78;

void fix_to_processor(int number) {
  cpu_set_t allowed, one;
  CPU_ZERO(&one);
  sched_getaffinity(0, sizeof allowed, &allowed);
  for (int cpu = 0, seen = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &allowed) && seen++ == number) CPU_SET(cpu, &one);
  if (CPU_COUNT(&one)) pthread_setaffinity_np(pthread_self(), sizeof one, &one);
}

class Barrier {
 public:
  explicit Barrier(int size) : size_(size) {}
  void wait() {
    const int turn = turn_.load();
    if (arrived_.fetch_add(1) + 1 == size_) {
      arrived_.store(0);
      turn_.store(turn + 1);
    }
    while (turn_.load() == turn) std::this_thread::yield();
  }

 private:
  const int size_;
  std::atomic<int> arrived_{0}, turn_{0};
};

template <class Work>
void run_passes(int num_threads, int num_passes, double* seconds, const Work& work) {
  Barrier barrier(num_threads);
  auto body = [&](int thread) {
    fix_to_processor(thread);
    for (int pass = 0; pass < num_passes; ++pass) {
      barrier.wait();
      const auto begin = std::chrono::steady_clock::now();
      work(thread);
      barrier.wait();
      const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
      if (thread == 0) seconds[pass] = passed.count();
    }
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < num_threads; ++thread) threads.emplace_back(body, thread);
  for (auto& thread : threads) thread.join();
}

inline void read_vector(const char* address) {
#if defined(__AVX512F__)
  asm volatile("vmovups %0, %%zmm0" : : "m"(*reinterpret_cast<const Words*>(address)) : "xmm0");
#elif defined(__AVX__)
  asm volatile("vmovups %0, %%ymm0" : : "m"(*reinterpret_cast<const Words*>(address)) : "xmm0");
#else
  asm volatile("" : : "r"(*reinterpret_cast<const volatile std::int64_t*>(address)));
#endif
}

// Reads `num_bytes`, a multiple of kVectorBytes * kStreams * kUnroll, as kStreams ranges at the same time.
template <int kStreams, int kUnroll>
void read_range(const char* begin, std::size_t num_bytes) {
  const std::size_t range = num_bytes / kStreams;
  for (std::size_t offset = 0; offset < range; offset += kVectorBytes * kUnroll)
#pragma GCC unroll 16
    for (int stream = 0; stream < kStreams; ++stream)
#pragma GCC unroll 16
      for (int i = 0; i < kUnroll; ++i) read_vector(begin + stream * range + offset + kVectorBytes * i);
}

using Reader = void (*)(const char*, std::size_t);
constexpr Reader kReaders[] = {read_range<1, 4>, read_range<1, 8>, read_range<1, 16>, read_range<2, 4>,
                               read_range<2, 8>, read_range<4, 2>, read_range<4, 4>,  read_range<8, 2>};

// Loops of multiplications into registers 0 to 11, each by the numbers of its own: the assembler repeats the line, since
// a compiler keeps arrays of accumulators in memory when it can.
#define BLOCKYARD_MULTIPLY(name, instruction, register)                                                       \
  void name(std::int64_t num_turns) {                                                                         \
    asm volatile(                                                                                             \
        "vpbroadcastq %1, %%" register "14\n\tvpbroadcastq %1, %%" register "15\n"                             \
        ".irp number,0,1,2,3,4,5,6,7,8,9,10,11\n\tvpbroadcastq %2, %%" register "\\number\n.endr\n"            \
        "1:\n"                                                                                                \
        ".irp number,0,1,2,3,4,5,6,7,8,9,10,11\n\t" instruction " %%" register "14, %%" register "15, %%"     \
        register "\\number\n.endr\n\t"                                                                       \
        "dec %0\n\tjnz 1b"                                                                                    \
        : "+r"(num_turns)                                                                                     \
        : "x"(kOperands), "x"(std::int64_t{0})                                                                \
        : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", \
          "xmm14", "xmm15", "cc");                                                                            \
  }

BLOCKYARD_MULTIPLY(multiply_fma_ymm, "vfmadd231ps", "ymm")
BLOCKYARD_MULTIPLY(multiply_fma_zmm, "vfmadd231ps", "zmm")
BLOCKYARD_MULTIPLY(multiply_bf16_zmm, "vdpbf16ps", "zmm")
BLOCKYARD_MULTIPLY(multiply_bytes_ymm, "%{vex%} vpdpbusd", "ymm")
BLOCKYARD_MULTIPLY(multiply_bytes_zmm, "vpdpbusd", "zmm")

// The operand of LDTILECFG: eight tiles of 16 rows of 64 bytes.
struct alignas(64) TileConfiguration {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The same of tile registers 0 to 5. Assembly too, and for every processor: the assembler knows tiles where the compiler
// was not told of them, and GCC 12's intrinsics do not tell the compiler what memory they read.
constexpr int kTileChains = 6;
#define BLOCKYARD_MULTIPLY_TILES(name, instruction)                                                       \
  void name(std::int64_t num_turns) {                                                                     \
    const TileConfiguration configuration;                                                                \
    alignas(64) std::int64_t operands[16 * 64 / sizeof kOperands];                                        \
    for (std::int64_t& each : operands) each = kOperands;                                                 \
    asm volatile(                                                                                         \
        "ldtilecfg %1\n\ttileloadd (%2,%3,1), %%tmm6\n\ttileloadd (%2,%3,1), %%tmm7\n"                    \
        ".irp number,0,1,2,3,4,5\n\ttilezero %%tmm\\number\n.endr\n"                                      \
        "1:\n"                                                                                            \
        ".irp number,0,1,2,3,4,5\n\t" instruction " %%tmm7, %%tmm6, %%tmm\\number\n.endr\n\t"             \
        "dec %0\n\tjnz 1b\n\ttilerelease"                                                                 \
        : "+r"(num_turns)                                                                                 \
        : "m"(configuration), "r"(operands), "r"(std::int64_t{64})                                        \
        : "memory", "cc");                                                                                \
  }

BLOCKYARD_MULTIPLY_TILES(multiply_bf16_tiles, "tdpbf16ps")
BLOCKYARD_MULTIPLY_TILES(multiply_bytes_tiles, "tdpbusd")

struct Loop {
  void (*run)(std::int64_t num_turns);
  int num_chains;
  // Multiplications and additions of one instruction.
  int num_operations;
  // How many times as long a turn is as one of vectors, about.
  int length;
};

// By the numbers of ceilings.py's INSTRUCTIONS.
constexpr Loop kLoops[] = {
    {multiply_fma_ymm, kChains, 16, 1},     {multiply_fma_zmm, kChains, 32, 1},
    {multiply_bf16_zmm, kChains, 64, 1},    {multiply_bytes_ymm, kChains, 64, 1},
    {multiply_bytes_zmm, kChains, 128, 1},  {multiply_bf16_tiles, kTileChains, 16 * 16 * 32 * 2, 16},
    {multiply_bytes_tiles, kTileChains, 16 * 16 * 64 * 2, 16},
};

}  // namespace

extern "C" {

// Memory in 2 MiB pages where the system gives them, written once; null where there is none. `num_bytes`: of 2 MiB.
void* allocate(std::size_t num_bytes) {
  void* whole = mmap(nullptr, num_bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (whole == MAP_FAILED) return nullptr;
  const auto address = (reinterpret_cast<std::uintptr_t>(whole) + kHugePage - 1) / kHugePage * kHugePage;
  void* aligned = reinterpret_cast<void*>(address);
  madvise(aligned, num_bytes, MADV_HUGEPAGE);
  std::memset(aligned, 1, num_bytes);
  return aligned;
}

int num_readers() { return sizeof kReaders / sizeof *kReaders; }

// Each thread reads its part of the buffer once a pass. `num_bytes`: a multiple of 4 KiB for each thread.
void measure_read(int reader, const void* buffer, std::size_t num_bytes, int num_threads, int num_passes,
                  double* seconds) {
  const std::size_t part = num_bytes / num_threads;
  run_passes(num_threads, num_passes, seconds,
             [&](int thread) { kReaders[reader](static_cast<const char*>(buffer) + thread * part, part); });
}

// Asks Linux for tile registers, which it gives to a process that asks.
bool request_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Operations of one pass of all threads. `num_turns`: of a loop of vectors. The processor must have the instruction.
double measure_multiply(int instruction, std::int64_t num_turns, int num_threads, int num_passes, double* seconds) {
  const Loop& loop = kLoops[instruction];
  const std::int64_t turns = num_turns / loop.length;
  run_passes(num_threads, num_passes, seconds, [&](int) { loop.run(turns); });
  return 1.0 * turns * loop.num_chains * loop.num_operations * num_threads;
}
}
