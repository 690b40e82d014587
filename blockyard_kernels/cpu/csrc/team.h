// The threads that compute: a team that walks through the phases of a step together.
//
// Owns the threads, the division of a phase's units among them and the waits between phases. Knows no ops. A thread that
// is done with its share takes from the end of another's, so that one which the system has put aside delays the others
// by one piece at most. A wait spins for as long as a phase most often takes, then sleeps, and the core is free for the
// services of the same machine. It does not yield: a thread that yields goes behind everything else that could run.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <immintrin.h>

// The work of a team: phases in order, each of a number of units that may run in any order on any thread.
class Work {
   public:
    virtual ~Work() = default;
    virtual int num_phases() const = 0;
    // Units of a phase, below 2^31, and how many of them a thread takes at a time. Asked once by one thread, when all
    // phases before it are done.
    virtual int64_t num_units(int phase) = 0;
    virtual int64_t units_at_once(int phase) = 0;
    virtual void run(int phase, int64_t begin, int64_t end, int thread) = 0;
};

class Team {
   public:
    explicit Team(int num_threads) : num_threads_(num_threads), shares_(num_threads) {
        for (int thread = 1; thread < num_threads; thread++) threads_.emplace_back([this, thread] { follow(thread); });
    }

    ~Team() {
        stopping_.store(true);
        wake(job_);
        for (auto& thread : threads_) thread.join();
    }

    int num_threads() const { return num_threads_; }

    // Runs all phases, with the calling thread as one of the team. One call at a time.
    void run(Work& work) {
        work_ = &work;
        num_phases_ = work.num_phases();
        if (!num_phases_) return;
        prepare(0);
        if (num_threads_ == 1) {
            for (int phase = 0; phase < num_phases_; phase++) {
                if (phase) prepare(phase);
                work.run(phase, 0, num_units_, 0);
            }
            return;
        }
        num_inside_.store(num_threads_ - 1, std::memory_order_relaxed);
        wake(job_);
        walk(0);
        // The others still look at this job until they have left it.
        while (num_inside_.load(std::memory_order_acquire)) _mm_pause();
    }

   private:
    struct alignas(64) Share {
        // First unit in the upper half, end in the lower.
        std::atomic<uint64_t> range{0};
    };
    struct alignas(64) Word {
        std::atomic<uint32_t> value{0};
        std::atomic<int> sleepers{0};
    };

    // Some 30 microseconds.
    static constexpr int SPINS = 3000;

    void follow(int thread) {
        uint32_t seen = 0;
        while (true) {
            await(job_, seen);
            seen = job_.value.load(std::memory_order_acquire);
            if (stopping_.load()) return;
            walk(thread);
            num_inside_.fetch_sub(1, std::memory_order_release);
        }
    }

    void walk(int thread) {
        const int num_phases = num_phases_;
        for (int phase = 0; phase < num_phases; phase++) {
            work_phase(phase, thread);
            const uint32_t turn = turn_.value.load(std::memory_order_relaxed);
            if (num_done_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
                num_done_.store(0, std::memory_order_relaxed);
                if (phase + 1 < num_phases) prepare(phase + 1);
                wake(turn_);
            } else {
                await(turn_, turn);
            }
        }
    }

    // Divides a phase into equal shares of neighbouring units.
    void prepare(int phase) {
        num_units_ = work_->num_units(phase);
        at_once_ = work_->units_at_once(phase);
        for (int thread = 0; thread < num_threads_; thread++) {
            uint64_t begin = num_units_ * thread / num_threads_, end = num_units_ * (thread + 1) / num_threads_;
            shares_[thread].range.store(begin << 32 | end, std::memory_order_relaxed);
        }
    }

    void work_phase(int phase, int thread) {
        int64_t begin, end;
        while (take(shares_[thread].range, true, begin, end)) work_->run(phase, begin, end, thread);
        for (int other = 1; other < num_threads_; other++)
            while (take(shares_[(thread + other) % num_threads_].range, false, begin, end))
                work_->run(phase, begin, end, thread);
    }

    bool take(std::atomic<uint64_t>& range, bool front, int64_t& begin, int64_t& end) {
        uint64_t seen = range.load(std::memory_order_relaxed);
        while (true) {
            const int64_t first = (int64_t)(seen >> 32), last = (int64_t)(seen & 0xffffffff);
            if (first >= last) return false;
            const int64_t count = std::min(at_once_, last - first);
            begin = front ? first : last - count;
            end = begin + count;
            const uint64_t rest = front ? (uint64_t)end << 32 | (uint64_t)last : (uint64_t)first << 32 | (uint64_t)begin;
            if (range.compare_exchange_weak(seen, rest, std::memory_order_relaxed)) return true;
        }
    }

    static void wake(Word& word) {
        word.value.fetch_add(1, std::memory_order_seq_cst);
        if (word.sleepers.load(std::memory_order_seq_cst))
            syscall(SYS_futex, &word.value, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
    }

    // Waits until the word is no longer what was seen.
    static void await(Word& word, uint32_t seen) {
        for (int i = 0; i < SPINS; i++) {
            if (word.value.load(std::memory_order_acquire) != seen) return;
            _mm_pause();
        }
        word.sleepers.fetch_add(1, std::memory_order_seq_cst);
        while (word.value.load(std::memory_order_seq_cst) == seen)
            syscall(SYS_futex, &word.value, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        word.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }

    const int num_threads_;
    std::vector<Share> shares_;
    std::vector<std::thread> threads_;
    Work* work_ = nullptr;
    int num_phases_ = 0;
    int64_t num_units_ = 0;
    int64_t at_once_ = 1;
    Word job_;
    Word turn_;
    alignas(64) std::atomic<int> num_done_{0};
    alignas(64) std::atomic<int> num_inside_{0};
    std::atomic<bool> stopping_{false};
};
