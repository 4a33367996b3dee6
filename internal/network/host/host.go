// Package host gives networks access to the machine: namespaces, links, taps, sysctls and resolvers.
//
// Its functions work in the network namespace of the calling thread; Space.Do chooses it. The package decides nothing and keeps
// no state.
package host

import (
	"bufio"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// TunDevice is the device that creates taps.
const TunDevice = "/dev/net/tun"

// ErrTaken says that a link of that name already exists.
var ErrTaken = errors.New("link name is taken")

// FindLink returns the link called name, nil if there is none.
func FindLink(name string) (netlink.Link, error) {
	l, err := netlink.LinkByName(name)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look for link %s: %w", name, err)
	}
	return l, nil
}

// ListLinks dumps all links. The kernel interrupts a dump if links change meanwhile; then it is retried.
func ListLinks() ([]netlink.Link, error) {
	for {
		links, err := netlink.LinkList()
		if errors.Is(err, netlink.ErrDumpInterrupted) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list links: %w", err)
		}
		return links, nil
	}
}

// RemoveLink removes a link; it is no error if the link is already gone.
func RemoveLink(l netlink.Link) error {
	err := netlink.LinkDel(l)
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove link %s: %w", l.Attrs().Name, err)
	}
	return nil
}

// batch is the maximum number of links removed in one request, so that other callers that change links wait only for a moment.
const batch = 64

// RemoveLinks removes links as RemoveLink does, and returns the error of each. Removing one link waits for the kernel for up to
// tens of milliseconds; links removed in one request share that wait.
func RemoveLinks(links []netlink.Link) []error {
	errs := make([]error, 0, len(links))
	for some := range slices.Chunk(links, batch) {
		if len(some) > 1 {
			removeTogether(some) // only for speed: links that it does not remove are removed one by one
		}
		for _, l := range some {
			errs = append(errs, RemoveLink(l))
		}
	}
	return errs
}

// removeTogether puts links into a group that nothing else uses and removes the group: the only way to remove many links in one
// request.
func removeTogether(links []netlink.Link) {
	group := rand.Uint32() | 1<<31 // avoids the small numbers that people use
	for _, l := range links {
		_ = netlink.LinkSetGroup(l, int(group))
	}
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	req := nl.NewNetlinkRequest(unix.RTM_DELLINK, unix.NLM_F_ACK)
	req.AddData(msg)
	req.AddData(nl.NewRtAttr(unix.IFLA_GROUP, nl.Uint32Attr(group)))
	_, _ = req.Execute(unix.NETLINK_ROUTE, 0)
}

// MakeTap creates a persistent tap and calls plug to put it in place. It makes the tap persistent last: after kill -9 at any
// earlier point the kernel removes the tap with our file. The hypervisor opens the tap again with IFF_VNET_HDR and one queue.
// Errors: ErrTaken; FailedPrecondition without TunDevice.
func MakeTap(name string, plug func() error) error {
	f, err := OpenTun()
	if err != nil {
		return err
	}
	defer f.Close()
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		return fmt.Errorf("name tap %s: %w", name, err)
	}
	ifr.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR | unix.IFF_TUN_EXCL)
	if err := unix.IoctlIfreq(int(f.Fd()), unix.TUNSETIFF, ifr); err != nil {
		if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EINVAL) {
			return ErrTaken // EINVAL: by a link that is not a tap
		}
		return fmt.Errorf("make tap %s: %w", name, err)
	}
	if err := plug(); err != nil {
		return err
	}
	if err := unix.IoctlSetInt(int(f.Fd()), unix.TUNSETPERSIST, 1); err != nil {
		return fmt.Errorf("keep tap %s: %w", name, err)
	}
	return nil
}

// OpenTun opens TunDevice, or returns why taps cannot be created.
func OpenTun() (*os.File, error) {
	f, err := os.OpenFile(TunDevice, os.O_RDWR|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, errdefs.New(errdefs.FailedPrecondition, "%s is missing; run `modprobe tun`, or in a container pass --device=%s: %w", TunDevice, TunDevice, err)
	case errors.Is(err, os.ErrPermission):
		return nil, errdefs.New(errdefs.FailedPrecondition, "no permission to open %s; run the daemon as root: %w", TunDevice, err)
	case err != nil:
		return nil, errdefs.New(errdefs.FailedPrecondition, "open %s: %w; run `modprobe tun`", TunDevice, err)
	}
	return f, nil
}

// CheckCaps returns why links cannot be created, before one is tried.
func CheckCaps() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	if data[0].Effective&(1<<unix.CAP_NET_ADMIN) == 0 {
		return errdefs.Preconditionf("bridges and taps need root (CAP_NET_ADMIN); run the daemon as root")
	}
	return nil
}

// Sysctl reads a value below /proc/sys/net.
func Sysctl(key string) (string, error) {
	b, err := os.ReadFile(filepath.Join("/proc/sys/net", key))
	return strings.TrimSpace(string(b)), err
}

// QuietIPv6 switches the kernel's IPv6 off on a link, if the kernel has IPv6.
func QuietIPv6(link string) error {
	err := SetSysctl("ipv6/conf/"+link+"/disable_ipv6", "1")
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// SetSysctl writes a value unless it is already set. So it also works on hosts where /proc/sys is read-only.
func SetSysctl(key, value string) error {
	if old, err := Sysctl(key); err != nil || old == value {
		return err
	}
	if err := os.WriteFile(filepath.Join("/proc/sys/net", key), []byte(value), 0o644); err != nil {
		return errdefs.New(errdefs.FailedPrecondition, "set sysctl net/%s to %s: %w; set it on the host", key, value, err)
	}
	return nil
}

// TapLock serialises changes of the taps of one network: one change at a time per tap, or one of the whole network. The zero
// value is ready. It is safe for concurrent use.
type TapLock struct {
	whole sync.RWMutex   // held for reading by changes of single taps
	taps  [64]sync.Mutex // index: a hash of the tap's name
}

// Tap waits until nothing else changes the tap or the network. The caller must call unlock.
func (l *TapLock) Tap(name string) (unlock func()) {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name)) // never fails
	tap := &l.taps[h.Sum32()%uint32(len(l.taps))]
	l.whole.RLock()
	tap.Lock()
	return func() {
		tap.Unlock()
		l.whole.RUnlock()
	}
}

// Whole waits until nothing else changes the network. The caller must call unlock.
func (l *TapLock) Whole() (unlock func()) {
	l.whole.Lock()
	return l.whole.Unlock
}

// Read waits until nothing changes the whole network. Taps may change meanwhile. The caller must call unlock.
func (l *TapLock) Read() (unlock func()) {
	l.whole.RLock()
	return l.whole.RUnlock
}

// Resolvers returns the host's own name servers, except those on the host's loopback, which guests cannot reach.
// systemd-resolved keeps the real ones in another file.
func Resolvers() []netip.Addr {
	for _, path := range []string{"/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"} {
		b, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		if out := parseResolvConf(string(b)); len(out) > 0 {
			return out
		}
	}
	return nil
}

// NameServers returns the name servers that this host itself asks, at most three, of both families and also on its loopback.
func NameServers() []netip.Addr {
	b, err := os.ReadFile("/etc/resolv.conf")
	if err != nil {
		return nil
	}
	return nameServers(string(b), func(a netip.Addr) bool { return !a.IsUnspecified() })
}

// parseResolvConf returns the IPv4 name servers that are not on loopback, at most the three that resolvers use.
func parseResolvConf(s string) []netip.Addr {
	return nameServers(s, func(a netip.Addr) bool { return a.Is4() && !a.IsLoopback() && !a.IsUnspecified() })
}

func nameServers(s string, useful func(netip.Addr) bool) []netip.Addr {
	var out []netip.Addr
	for sc := bufio.NewScanner(strings.NewReader(s)); sc.Scan() && len(out) < 3; {
		f := strings.Fields(sc.Text())
		if len(f) < 2 || f[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(f[1]); err == nil && useful(a) {
			out = append(out, a)
		}
	}
	return out
}

// Searches returns the domains in which the host completes names.
func Searches() []string {
	b, err := os.ReadFile("/etc/resolv.conf")
	if err != nil {
		return nil
	}
	return parseSearches(string(b))
}

// domainRE matches domains without the root, which completes nothing.
var domainRE = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,252}$`)

// parseSearches returns the domains of the last line that has some, which is the one that counts.
func parseSearches(s string) []string {
	var out []string
	for sc := bufio.NewScanner(strings.NewReader(s)); sc.Scan(); {
		if f := strings.Fields(sc.Text()); len(f) > 0 && (f[0] == "search" || f[0] == "domain") {
			out = slices.DeleteFunc(f[1:], func(d string) bool { return !domainRE.MatchString(d) })
		}
	}
	return out
}
