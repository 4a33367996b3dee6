package stats

import (
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Counters of a link, from the host's side.
const (
	linkRx = iota
	linkTx
	linkRxErrors
	linkTxErrors
)

type link struct {
	index    int
	counters [4]uint64
}

// readLinks returns the links of a network namespace ("" is ours) by name, with one kernel request for all of them.
func readLinks(netns string) (map[string]link, error) {
	if netns == "" {
		return dumpLinks()
	}
	type answer struct {
		links map[string]link
		err   error
	}
	got := make(chan answer, 1)
	go func() {
		// The thread stays locked: it ends with the goroutine, so no other goroutine runs in its namespace.
		runtime.LockOSThread()
		links, err := dumpLinksIn(netns)
		got <- answer{links, err}
	}()
	a := <-got
	return a.links, a.err
}

func dumpLinksIn(netns string) (map[string]link, error) {
	f, err := os.Open(netns)
	if err != nil {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	defer f.Close()
	if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
		return nil, fmt.Errorf("enter network namespace %s: %w", netns, err)
	}
	return dumpLinks()
}

func dumpLinks() (map[string]link, error) {
	raw, err := syscall.NetlinkRIB(syscall.RTM_GETLINK, syscall.AF_UNSPEC)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	messages, err := syscall.ParseNetlinkMessage(raw)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	out := make(map[string]link, len(messages))
	for i := range messages {
		m := &messages[i]
		if m.Header.Type != syscall.RTM_NEWLINK || len(m.Data) < syscall.SizeofIfInfomsg {
			continue
		}
		name, l, err := parseLink(m.Data)
		if err != nil {
			return nil, err
		}
		out[name] = l
	}
	return out, nil
}

// parseLink reads struct ifinfomsg and the two relevant attributes.
func parseLink(data []byte) (name string, l link, err error) {
	l.index = int(int32(binary.NativeEndian.Uint32(data[4:8])))
	for data = data[syscall.SizeofIfInfomsg:]; len(data) >= unix.SizeofRtAttr; {
		size, kind := int(binary.NativeEndian.Uint16(data)), binary.NativeEndian.Uint16(data[2:])
		if size < unix.SizeofRtAttr || size > len(data) {
			return "", l, errdefs.New(errdefs.Internal, "list links: an attribute of %d bytes in %d", size, len(data))
		}
		value := data[unix.SizeofRtAttr:size]
		switch {
		case kind == unix.IFLA_IFNAME:
			name = unix.ByteSliceToString(value)
		case kind == unix.IFLA_STATS64 && len(value) >= 6*8:
			at := func(i int) uint64 { return binary.NativeEndian.Uint64(value[8*i:]) }
			l.counters = [4]uint64{linkRx: at(2), linkTx: at(3), linkRxErrors: at(4), linkTxErrors: at(5)}
		}
		data = data[min((size+3)&^3, len(data)):]
	}
	return name, l, nil
}
