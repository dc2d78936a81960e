#include "routes.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>

namespace {

using IsBestRoute = int (*)(int, const struct sockaddr *);
std::atomic<IsBestRoute> ucx_is_best_route{nullptr};

struct Question {
    struct nlmsghdr head;
    struct rtmsg route;
    struct rtattr device;
    int device_index;
    struct rtattr destination;
    unsigned char address[16];
};

struct Answer {
    int device = 0;        // 0: the kernel knows no way
    bool is_local = false; // the address is this host's own
};

size_t address_bytes(const struct sockaddr *address) { return address->sa_family == AF_INET ? 4 : 16; }

const void *address_of(const struct sockaddr *address) {
    return address->sa_family == AF_INET ? static_cast<const void *>(&reinterpret_cast<const struct sockaddr_in *>(address)->sin_addr)
                                         : &reinterpret_cast<const struct sockaddr_in6 *>(address)->sin6_addr;
}

// device: the one that the way must lead through; 0: any. With one, the kernel is asked for what is in its table only: it takes an address that it
// knows no way to for one on that device's own network otherwise.
Question question_about(const struct sockaddr *remote, int device) {
    Question question{};
    question.route.rtm_family = remote->sa_family;
    question.route.rtm_dst_len = static_cast<unsigned char>(8 * address_bytes(remote));
    question.route.rtm_flags = device ? RTM_F_FIB_MATCH : 0;
    question.device.rta_type = RTA_OIF;
    question.device.rta_len = RTA_LENGTH(sizeof(device));
    question.device_index = device;
    question.destination.rta_type = RTA_DST;
    question.destination.rta_len = static_cast<unsigned short>(RTA_LENGTH(address_bytes(remote)));
    std::memcpy(question.address, address_of(remote), address_bytes(remote));
    question.head.nlmsg_len = static_cast<uint32_t>(offsetof(Question, address) + address_bytes(remote));
    question.head.nlmsg_type = RTM_GETROUTE;
    question.head.nlmsg_flags = NLM_F_REQUEST;
    return question;
}

// How the kernel sends to `remote` now.
Answer ask_kernel(const struct sockaddr *remote, int through = 0) {
    const int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
    if (fd < 0) {
        return {};
    }
    const Question question = question_about(remote, through);
    alignas(struct nlmsghdr) char answer[4096];
    ssize_t length = send(fd, &question, question.head.nlmsg_len, 0);
    if (length >= 0) {
        length = recv(fd, answer, sizeof(answer), 0); // the kernel has answered before `send` returned
    }
    close(fd);
    const auto *head = reinterpret_cast<const struct nlmsghdr *>(answer);
    if (length < 0 || !NLMSG_OK(head, static_cast<size_t>(length)) || head->nlmsg_type != RTM_NEWROUTE) {
        return {};
    }
    const auto *route = static_cast<const struct rtmsg *>(NLMSG_DATA(head));
    auto left = static_cast<int>(RTM_PAYLOAD(head));
    for (const struct rtattr *attribute = RTM_RTA(route); RTA_OK(attribute, left); attribute = RTA_NEXT(attribute, left)) {
        if (attribute->rta_type == RTA_OIF) {
            int device;
            std::memcpy(&device, RTA_DATA(attribute), sizeof(device));
            return {device, route->rtm_type == RTN_LOCAL};
        }
        if (attribute->rta_type == RTA_MULTIPATH) {
            return {through, false}; // one way of several, which the table keeps together
        }
    }
    return {};
}

// Whether `address` is one of the device's own.
bool holds(int device, const struct sockaddr *address) {
    char name[IF_NAMESIZE];
    struct ifaddrs *all = nullptr;
    if (!if_indextoname(static_cast<unsigned>(device), name) || getifaddrs(&all) != 0) {
        return false;
    }
    bool found = false;
    for (const struct ifaddrs *one = all; one && !found; one = one->ifa_next) {
        found = one->ifa_addr && one->ifa_addr->sa_family == address->sa_family && std::strcmp(one->ifa_name, name) == 0 &&
                std::memcmp(address_of(one->ifa_addr), address_of(address), address_bytes(address)) == 0;
    }
    freeifaddrs(all);
    return found;
}

} // namespace

// Under UCX's name, instead of UCX's. To one of this host's own addresses everything goes through the loopback device, as the kernel sees it; who
// connects there means the device that has it. UCX's own answer counts where the kernel has a way through that device as well, though not its first
// choice: UCX lets several devices lead to one network, but does not learn that one of them does not lead there any more.
extern "C" __attribute__((visibility("default"))) int ucs_netlink_is_best_route(int if_index, const struct sockaddr *remote) {
    const IsBestRoute theirs = ucx_is_best_route.load();
    if (remote->sa_family != AF_INET && remote->sa_family != AF_INET6) {
        return theirs ? theirs(if_index, remote) : 0;
    }
    const Answer best = ask_kernel(remote);
    if (best.is_local) {
        return best.device == if_index || holds(if_index, remote);
    }
    if (best.device == if_index) {
        return 1;
    }
    return theirs && theirs(if_index, remote) && ask_kernel(remote, if_index).device == if_index;
}

namespace baton {

void offer_routes() {
    Dl_info here{};
    if (dladdr(reinterpret_cast<void *>(&ucs_netlink_is_best_route), &here) && here.dli_fname) {
        dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL);
    }
}

void know_routes_of(void *library) {
    auto found = reinterpret_cast<IsBestRoute>(dlsym(library, "ucs_netlink_is_best_route"));
    ucx_is_best_route.store(found == &ucs_netlink_is_best_route ? nullptr : found);
}

} // namespace baton
