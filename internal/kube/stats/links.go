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

// readLinks returns the links of a network namespace ("" is that of this process) by name, with one kernel request for all
// links.
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
		// The thread stays locked, so it ends with the goroutine, and no other goroutine runs in its namespace.
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

// dumpLinks reads all links through one socket and one buffer, which is larger than any message of the kernel's.
func dumpLinks() (map[string]link, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	defer unix.Close(fd)
	request := make([]byte, unix.NLMSG_HDRLEN+unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(request, uint32(len(request)))
	binary.NativeEndian.PutUint16(request[4:], unix.RTM_GETLINK)
	binary.NativeEndian.PutUint16(request[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	if err := unix.Sendto(fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	out := map[string]link{}
	for buf := make([]byte, 64<<10); ; {
		n, from, err := unix.Recvfrom(fd, buf, 0)
		if err != nil {
			return nil, fmt.Errorf("list links: %w", err)
		}
		if kernel, ok := from.(*unix.SockaddrNetlink); !ok || kernel.Pid != 0 {
			continue
		}
		messages, err := syscall.ParseNetlinkMessage(buf[:n])
		if err != nil {
			return nil, fmt.Errorf("list links: %w", err)
		}
		for _, m := range messages {
			switch {
			case m.Header.Type == unix.NLMSG_DONE:
				return out, nil
			case m.Header.Type == unix.NLMSG_ERROR:
				return nil, errdefs.New(errdefs.Internal, "list links: the kernel rejected the request")
			case m.Header.Type == unix.RTM_NEWLINK && len(m.Data) >= unix.SizeofIfInfomsg:
				name, l, err := parseLink(m.Data)
				if err != nil {
					return nil, err
				}
				out[name] = l
			}
		}
	}
}

// parseLink reads struct ifinfomsg and the two relevant attributes.
func parseLink(data []byte) (name string, l link, err error) {
	l.index = int(int32(binary.NativeEndian.Uint32(data[4:8])))
	for data = data[unix.SizeofIfInfomsg:]; len(data) >= unix.SizeofRtAttr; {
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
