package vm

import (
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// NFS names a folder of an NFS server. The guest mounts it over its own network; the host never does.
type NFS struct {
	Server   string   `json:"server"`            // host name, or IP address without brackets
	Path     string   `json:"path"`              // absolute, as the server exports it
	Options  []string `json:"options,omitempty"` // as of mount.nfs; see NFSOption
	ReadOnly bool     `json:"ro,omitempty"`      // the VM cannot write to it
}

// ArgNFS is the argument of the kernel of a guest that needs the modules for NFS.
const ArgNFS = "cocoon.nfs"

// Limits of an NFS volume, in bytes and in options.
const (
	maxNFSServer  = 253
	maxNFSPath    = 1024 // PATH_MAX of NFS clients (NFS_MAXPATHLEN)
	maxNFSOptions = 32
	maxNFSNumber  = 9 // digits
)

// NFSPort is the default TCP port of NFS servers.
const NFSPort = 2049

var (
	nfsServerRE = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?$`)
	nfsZoneRE   = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,15}$`)
)

// nfsVersions are the minor versions of NFS 4 that a guest tries in turn if no option names one.
var nfsVersions = []string{"4.2", "4.1", "4.0"}

// nfsFlags are the options without a value that the file system of the guest's kernel has, and the attributes of any mount.
var nfsFlags = []string{
	"hard", "soft", "softerr", "softreval", "nosoftreval", "ac", "noac", "cto", "nocto", "rdirplus", "nordirplus", "resvport", "noresvport",
	"sharecache", "nosharecache", "sync", "async",
	"ro", "nosuid", "noexec", "noatime", "nodiratime", "strictatime",
}

// nfsIdle are options that have no effect on a mount of NFS 4 by a guest, and that lists of options often have.
var nfsIdle = []string{
	"defaults", "_netdev", "rw", "suid", "exec", "nodev", "atime", "diratime", "relatime", "intr", "nointr", "lock", "nolock", "nfsvers=4", "vers=4",
}

// nfsNumbers are the options whose value is a number.
var nfsNumbers = []string{
	"timeo", "retrans", "rsize", "wsize", "acregmin", "acregmax", "acdirmin", "acdirmax", "actimeo", "nconnect", "port",
}

// nfsWords are the options whose value is one of some words.
var nfsWords = map[string][]string{
	"vers": nfsVersions, "nfsvers": nfsVersions, "proto": {"tcp", "tcp6"}, "sec": {"sys"}, "lookupcache": {"all", "none", "pos", "positive"},
}

// NFSOption is an option of a mount of NFS, as of mount.nfs.
type NFSOption struct {
	Name  string
	Value string // "": it has none
}

// ParseNFSOptions returns the options of a list that have an effect. An entry may have several, separated by commas.
// Errors: InvalidArgument for an option that a guest does not support.
func ParseNFSOptions(list []string) (out []NFSOption, err error) {
	for o := range strings.SplitSeq(strings.Join(list, ","), ",") {
		name, value, valued := strings.Cut(o, "=")
		switch {
		case o == "" || slices.Contains(nfsIdle, o):
			continue
		case !valued && slices.Contains(nfsFlags, name),
			slices.Contains(nfsWords[name], value),
			slices.Contains(nfsNumbers, name) && isNumber(value) && (name != "port" || value != "0" && len(value) <= 5 && atoi(value) <= 65535):
		case name == "vers" || name == "nfsvers" || name == "minorversion":
			return nil, errdefs.Invalidf("mount option %q is not supported: a guest mounts versions %s of NFS; leave it out, or name one of them with nfsvers=", o, strings.Join(nfsVersions, ", "))
		case name == "sec":
			return nil, errdefs.Invalidf("mount option %q is not supported: a guest has no keys of Kerberos; use sec=sys", o)
		default:
			return nil, errdefs.Invalidf("mount option %q is not supported for NFS in a guest; leave it out", o)
		}
		out = append(out, NFSOption{name, value})
		if len(out) > maxNFSOptions {
			return nil, errdefs.Invalidf("more than %d mount options", maxNFSOptions)
		}
	}
	return out, nil
}

// isNumber reports whether s is a short decimal number.
func isNumber(s string) bool {
	return s != "" && len(s) <= maxNFSNumber && !strings.ContainsFunc(s, func(r rune) bool { return r < '0' || r > '9' })
}

func atoi(s string) int {
	n, _ := strconv.Atoi(s) // digits
	return n
}

// Versions returns the versions of NFS to try, in order, and the TCP port of the server that n's options name.
// Precondition: n is valid.
func (n NFS) Versions() (versions []string, port int) {
	versions, port = nfsVersions, NFSPort
	options, _ := ParseNFSOptions(n.Options)
	for _, o := range options {
		switch o.Name {
		case "vers", "nfsvers":
			versions = []string{o.Value}
		case "port":
			port = atoi(o.Value)
		}
	}
	return versions, port
}

// Source returns what the kernel calls the mounted folder.
func (n NFS) Source() string {
	if strings.Contains(n.Server, ":") {
		return "[" + n.Server + "]:" + n.Path
	}
	return n.Server + ":" + n.Path
}

// Validate returns an InvalidArgument error unless a guest can try to mount n.
func (n NFS) Validate() error {
	addr, err := netip.ParseAddr(n.Server)
	switch {
	case err == nil && addr.Zone() != "" && !nfsZoneRE.MatchString(addr.Zone()), err != nil && (len(n.Server) > maxNFSServer || !nfsServerRE.MatchString(n.Server)):
		return errdefs.Invalidf("%q is not the name or address of an NFS server", n.Server)
	case len(n.Path) > maxNFSPath:
		return errdefs.Invalidf("the path on NFS server %s has %d bytes; at most %d are possible", n.Server, len(n.Path), maxNFSPath)
	case !strings.HasPrefix(n.Path, "/") || path.Clean(n.Path) != "/" && !localPath(path.Clean(n.Path)[1:]),
		slices.Contains(strings.Split(n.Path, "/"), ".."),
		strings.ContainsFunc(n.Path, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return errdefs.Invalidf("%q is not a path on an NFS server: it must be absolute, without \"..\" and control characters", n.Path)
	}
	_, err = ParseNFSOptions(n.Options)
	return err
}

// NFSVolumes returns the volumes of s that are folders of NFS servers.
func (s Spec) NFSVolumes() (out []Volume) {
	for _, v := range s.Volumes {
		if v.Kind == VolumeNFS {
			out = append(out, v)
		}
	}
	return out
}
