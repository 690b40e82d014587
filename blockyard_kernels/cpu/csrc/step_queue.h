// Hands records of steps to the thread that computes, and its answers to the thread that sends them, both in order.
//
// Owns the two queues and the waits. Knows no step: a record and an answer are words. Neither side needs Python's lock.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include <immintrin.h>
#include <unistd.h>

using StepWords = std::vector<int64_t>;

class StepQueue {
   public:
    // `event`: a file descriptor of eventfd, which is written when an answer can be taken.
    explicit StepQueue(int event) : event_(event) {}

    // Takes records from now on; this is the first.
    void open(StepWords record) {
        const std::lock_guard<std::mutex> lock(mutex_);
        records_.clear();
        records_.push_back(std::move(record));
        is_open_ = true, is_ending_ = drops_ = false;
        num_ready_.store(1, std::memory_order_relaxed);
    }

    // Returns whether the record was taken: not if the queue is closed, or will be.
    bool push(StepWords record) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!is_open_ || is_ending_) return false;
        records_.push_back(std::move(record));
        wake();
        return true;
    }

    // Takes no more records. Those that wait are done before `next` returns null, or, if it drops them, are left.
    void end(bool drops) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!is_open_) return;
        is_ending_ = true, drops_ |= drops;
        wake();
    }

    // Waits for the next record; null: the queue has ended.
    const StepWords* next() {
        for (int i = 0; i < SPINS && !num_ready_.load(std::memory_order_relaxed); i++) _mm_pause();
        std::unique_lock<std::mutex> lock(mutex_);
        ready_.wait(lock, [this] { return is_ending_ || !records_.empty(); });
        return drops_ || records_.empty() ? nullptr : &records_.front();
    }

    // Ends the record that `next` gave last with an answer.
    void answer(StepWords answer) {
        const std::lock_guard<std::mutex> lock(mutex_);
        records_.pop_front();
        num_ready_.store((int)(records_.size() + is_ending_), std::memory_order_relaxed);
        send(std::move(answer));
    }

    // Sends what is no answer to a record, in its turn.
    void tell(int64_t word) {
        const std::lock_guard<std::mutex> lock(mutex_);
        send({word});
    }

    // Closes the queue, and returns how many records are left.
    int64_t close() {
        const std::lock_guard<std::mutex> lock(mutex_);
        is_open_ = false;
        return (int64_t)records_.size();
    }

    // Writes the first words of the records that were left when it closed.
    void left(int64_t* numbers) {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const StepWords& record : records_) *numbers++ = record[0];
    }

    // Writes the first answer that was not taken, and returns how many words it has; 0: there is none.
    int64_t take(int64_t* words) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (answers_.empty()) return 0;
        const StepWords answer = std::move(answers_.front());
        answers_.pop_front();
        std::copy(answer.begin(), answer.end(), words);
        return (int64_t)answer.size();
    }

   private:
    // Some tens of microseconds: a step that comes at once is not slept for.
    static constexpr int SPINS = 1000;

    void wake() {
        num_ready_.fetch_add(1, std::memory_order_relaxed);
        ready_.notify_one();
    }

    void send(StepWords answer) {
        answers_.push_back(std::move(answer));
        const uint64_t one = 1;
        // Only a full counter refuses it, and then the reader is awake.
        if (write(event_, &one, sizeof one) < 0) return;
    }

    const int event_;
    std::mutex mutex_;
    std::condition_variable ready_;
    std::deque<StepWords> records_, answers_;
    bool is_open_ = false, is_ending_ = false, drops_ = false;
    // Steps that `next` would return without waiting. Only a hint: the lock decides.
    std::atomic<int> num_ready_{0};
};
