// Steps that one thread hands over, a second one runs, and a third one interrupts: each is answered once, in its turn.
//
//     queue [rounds]
#include "step_queue.h"

#include <cstdio>
#include <cstdlib>
#include <thread>

#include <sys/eventfd.h>

namespace {

// What a thread of jobs is in Python: takes numbers one after another.
class Jobs {
   public:
    void post(int64_t number) {
        const std::lock_guard<std::mutex> lock(mutex_);
        numbers_.push_back(number);
        posted_.notify_one();
    }
    int64_t take() {
        std::unique_lock<std::mutex> lock(mutex_);
        posted_.wait(lock, [this] { return !numbers_.empty(); });
        const int64_t number = numbers_.front();
        numbers_.pop_front();
        return number;
    }
    bool is_empty() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return numbers_.empty();
    }

   private:
    std::mutex mutex_;
    std::condition_variable posted_;
    std::deque<int64_t> numbers_;
};

void run_jobs(StepQueue& queue, Jobs& jobs, int64_t* num_run) {
    while (const int64_t number = jobs.take()) {
        queue.open({number});
        if (!jobs.is_empty()) queue.end(false);
        while (const StepWords* record = queue.next()) {
            // Some steps are not for the loop.
            if ((*record)[0] % 7 == 0) break;
            ++*num_run;
            queue.answer({(*record)[0], 0});
        }
        StepWords left(queue.close());
        queue.left(left.data());
        for (int64_t each : left) queue.tell(each);
    }
}

}  // namespace

int main(int argc, char** argv) {
    const int64_t num_steps = 1000 * (argc > 1 ? atoi(argv[1]) : 10);
    const int event = eventfd(0, EFD_NONBLOCK);
    StepQueue queue(event);
    Jobs jobs;
    int64_t num_run = 0;
    std::atomic<bool> is_done{false};
    std::thread device([&] { run_jobs(queue, jobs, &num_run); });
    std::thread interrupter([&] {
        while (!is_done.load()) queue.end(rand() % 2), std::this_thread::yield();
    });
    int64_t sent = 0, answered = 0, words[2];
    while (answered < num_steps) {
        // Two steps are in flight.
        while (sent < num_steps && sent < answered + 2)
            if (!queue.push({++sent})) {
                jobs.post(sent);
                queue.end(false);
            }
        while (queue.take(words))
            if (words[0] != ++answered) return fprintf(stderr, "%ld came where %ld is due\n", words[0], answered), 1;
    }
    is_done.store(true);
    jobs.post(0);
    queue.end(false);
    interrupter.join(), device.join();
    if (!num_run) return fprintf(stderr, "no step was run in the loop\n"), 1;
    uint64_t count;
    if (read(event, &count, sizeof count) < 0 || (int64_t)count != num_steps) return fprintf(stderr, "lost events\n"), 1;
    puts("clean");
}
