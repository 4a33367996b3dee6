package bridge

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/host"
)

// flows makes the kernel forget connections. Rules let the packets of a known connection pass without a look at policies, and a
// connection that was redirected stays redirected. So what is known of a guest must not outlive it: the next one may have its
// address. The kernel can only list all connections, so callers that come at the same time share one list. Methods run in the
// network's namespace.
type flows struct {
	mu sync.Mutex

	queue  sync.Mutex
	wanted []*deletion
}

// deletion is a request to forget connections.
type deletion struct {
	of  func(flow) bool // reports which connections
	err error           // valid once the caller has had its turn
}

// flow is a connection as each of its two sides sends packets.
type flow struct{ original, reply tuple }

type tuple struct {
	src, dst     netip.Addr
	protocol     byte
	sport, dport uint16
}

// any reports whether is holds for an address of the connection.
func (f flow) any(is func(netip.Addr) bool) bool {
	return is(f.original.src) || is(f.original.dst) || is(f.reply.src) || is(f.reply.dst)
}

// countKey is the number of connections that the kernel knows in a namespace. Without the module there is no key.
const countKey = "netfilter/nf_conntrack_count"

// forget forgets all connections of the addresses.
func (f *flows) forget(addrs ...netip.Addr) error {
	if len(addrs) == 0 {
		return nil
	}
	gone := map[netip.Addr]bool{}
	for _, a := range addrs {
		gone[a] = true
	}
	return f.which(func(w flow) bool { return w.any(func(a netip.Addr) bool { return gone[a] }) })
}

// which forgets the connections that is reports. is must be safe to call from another goroutine.
func (f *flows) which(is func(flow) bool) error {
	if n, err := host.Sysctl(countKey); err != nil || n == "0" {
		return nil // the kernel knows no connections
	}
	mine := &deletion{of: is}
	f.queue.Lock()
	f.wanted = append(f.wanted, mine)
	f.queue.Unlock()

	f.mu.Lock()
	defer f.mu.Unlock()
	f.queue.Lock()
	todo := f.wanted // empty if another caller served ours too
	f.wanted = nil
	f.queue.Unlock()
	if len(todo) > 0 {
		err := serve(todo)
		for _, r := range todo {
			r.err = err
		}
	}
	return mine.err
}

// probeFlows returns why the kernel cannot be made to forget connections.
func probeFlows() error {
	const statistics = 5 // IPCTNL_MSG_CT_GET_STATS of the kernel
	if _, err := request(unix.AF_UNSPEC, statistics, unix.NLM_F_ACK).Execute(unix.NETLINK_NETFILTER, 0); unlisted(err) {
		return errdefs.New(errdefs.FailedPrecondition, "this kernel does not list its connections, so those of a guest would outlive it: %w; load the module with `modprobe nf_conntrack_netlink`", err)
	} else if err != nil {
		return fmt.Errorf("count connections: %w", err)
	}
	return nil
}

// unlisted reports whether err says that the kernel has no part that lists connections. Then no policies are enforced.
func unlisted(err error) bool { return errors.Is(err, unix.EINVAL) || absent(err) }

// serve lists all connections and removes those that are wanted.
func serve(todo []*deletion) error {
	var found [][]byte
	err := request(unix.AF_UNSPEC, nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP).ExecuteIter(unix.NETLINK_NETFILTER, 0, func(m []byte) bool {
		f := parseFlow(m)
		if slices.ContainsFunc(todo, func(r *deletion) bool { return r.of(f) }) {
			found = append(found, m)
		}
		return true
	})
	if unlisted(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list connections: %w", err)
	}
	var errs []error
	for _, m := range found {
		req := request(m[0], nl.IPCTNL_MSG_CT_DELETE, unix.NLM_F_ACK)
		req.AddRawData(m[nfgenSize:])
		if _, err := req.Execute(unix.NETLINK_NETFILTER, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("forget a connection: %w", err))
		}
	}
	return errors.Join(errs...)
}

// nfgenSize is the size of the header in front of the attributes, whose first byte is the family.
const nfgenSize = 4

func request(family byte, kind, flags int) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|kind, flags)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	return req
}

// parseFlow reads a message of the kernel. What it does not know stays zero.
func parseFlow(m []byte) (f flow) {
	if len(m) < nfgenSize {
		return f
	}
	for kind, value := range attributes(m[nfgenSize:]) {
		switch kind {
		case nl.CTA_TUPLE_ORIG:
			f.original = parseTuple(value)
		case nl.CTA_TUPLE_REPLY:
			f.reply = parseTuple(value)
		}
	}
	return f
}

func parseTuple(b []byte) (t tuple) {
	for kind, value := range attributes(b) {
		for part, v := range attributes(value) {
			switch {
			case kind == nl.CTA_TUPLE_IP && (part == nl.CTA_IP_V4_SRC || part == nl.CTA_IP_V6_SRC):
				t.src, _ = netip.AddrFromSlice(v)
			case kind == nl.CTA_TUPLE_IP && (part == nl.CTA_IP_V4_DST || part == nl.CTA_IP_V6_DST):
				t.dst, _ = netip.AddrFromSlice(v)
			case kind == nl.CTA_TUPLE_PROTO && part == nl.CTA_PROTO_NUM && len(v) == 1:
				t.protocol = v[0]
			case kind == nl.CTA_TUPLE_PROTO && part == nl.CTA_PROTO_SRC_PORT && len(v) == 2:
				t.sport = binary.BigEndian.Uint16(v)
			case kind == nl.CTA_TUPLE_PROTO && part == nl.CTA_PROTO_DST_PORT && len(v) == 2:
				t.dport = binary.BigEndian.Uint16(v)
			}
		}
	}
	return t
}

// attributes yields the kinds and values of netlink attributes.
func attributes(b []byte) func(yield func(uint16, []byte) bool) {
	const header = 4
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= header {
			size := int(binary.NativeEndian.Uint16(b))
			if size < header || size > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&nl.NLA_TYPE_MASK, b[header:size]) {
				return
			}
			b = b[min((size+3)&^3, len(b)):]
		}
	}
}
