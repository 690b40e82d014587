// Operands of ops, each of exactly the bytes that it needs, between bytes that nobody may write or touch.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "simd.h"

#define CHECK(holds)                                                        \
    do {                                                                    \
        if (!(holds)) {                                                     \
            fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #holds); \
            abort();                                                        \
        }                                                                   \
    } while (0)

// Elements that end where an inaccessible page begins. Sanitizers do not see what vector instructions with a mask touch:
// the processor does. What lies before is looked at in the end.
template <class T>
class Fenced {
   public:
    explicit Fenced(int64_t count) : count_(count) {
        const size_t page = sysconf(_SC_PAGESIZE), bytes = count * sizeof(T);
        size_ = (bytes + page - 1) / page * page + page;
        whole_ = (uint8_t*)mmap(nullptr, size_ + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(whole_ != MAP_FAILED);
        CHECK(mprotect(whole_ + size_, page, PROT_NONE) == 0);
        fenced_ = size_ + page;
        memset(whole_, CANARY, size_);
        place_ = (T*)(whole_ + size_ - bytes);
    }
    Fenced(const Fenced&) = delete;
    ~Fenced() {
        for (uint8_t* byte = whole_; byte < (uint8_t*)place_; byte++) CHECK(*byte == CANARY);
        munmap(whole_, fenced_);
    }

    T* data() { return place_; }
    int64_t size() const { return count_; }
    T& operator[](int64_t i) { return place_[i]; }
    bool equals(Fenced& other) { return count_ == other.count_ && !memcmp(place_, other.place_, count_ * sizeof(T)); }

   private:
    static constexpr uint8_t CANARY = 0xA5;
    int64_t count_;
    size_t size_, fenced_;
    uint8_t* whole_;
    T* place_;
};

inline float next_random() {
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(state >> 32) * 0x1p-31f;
}

inline uint8_t random_byte() { return (uint8_t)(int32_t)(next_random() * 0x1p23f); }

inline void set(float& place, float value) { place = value; }
inline void set(bf16& place, float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    place.bits = (uint16_t)(bits >> 16);
}
inline void set(int64_t& place, int64_t value) { place = value; }
inline void set(int32_t& place, int64_t value) { place = (int32_t)value; }

template <class E>
std::unique_ptr<Fenced<E>> random_values(int64_t count) {
    auto values = std::make_unique<Fenced<E>>(count);
    for (int64_t i = 0; i < count; i++) set((*values)[i], next_random());
    return values;
}

template <class I>
std::unique_ptr<Fenced<I>> list(const std::vector<int64_t>& numbers) {
    auto values = std::make_unique<Fenced<I>>(numbers.size());
    for (size_t i = 0; i < numbers.size(); i++) set((*values)[i], numbers[i]);
    return values;
}
