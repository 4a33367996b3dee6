package guestagent

import (
	"bufio"
	"errors"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// maxUserLine limits a line of passwd and group, in bytes. The files come from the image; longer lines are skipped.
const maxUserLine = 64 << 10

// user is the user that a process runs as.
type user struct {
	uid, gid uint32
	groups   []uint32
	listed   []uint32 // the groups of which the image says that the user is a member
	home     string
}

// told is u with these groups as the host is told of it.
func (u user) told(groups []uint32) *vm.ContainerUser {
	out := &vm.ContainerUser{UID: int64(u.uid), GID: int64(u.gid)}
	if !slices.Contains(groups, u.gid) {
		out.Groups = append(out.Groups, int64(u.gid))
	}
	for _, g := range groups[:min(len(groups), vm.MaxUserGroups-len(out.Groups))] {
		out.Groups = append(out.Groups, int64(g))
	}
	return out
}

// lookupUser resolves spec (empty, name, uid, user:group or uid:gid) with the files of the guest, which may be missing.
// A number needs no entry; a name without an entry is InvalidArgument.
func lookupUser(spec, passwdFile, groupFile string) (user, error) {
	passwd, err := readColon(passwdFile, 7)
	if err != nil {
		return user{}, err
	}
	group, err := readColon(groupFile, 4)
	if err != nil {
		return user{}, err
	}
	return resolveUser(spec, passwd, group)
}

func resolveUser(spec string, passwd, group [][]string) (user, error) {
	name, groupName, hasGroup := strings.Cut(spec, ":")
	if name == "" {
		name = "0"
	}
	u := user{home: "/"}
	entry := find(passwd, name)
	switch {
	case entry != nil:
		uid, err1 := id(entry[2])
		gid, err2 := id(entry[3])
		if err1 != nil || err2 != nil {
			return user{}, errdefs.Invalidf("user %q has a damaged entry in the guest's /etc/passwd", name)
		}
		u.uid, u.gid, u.groups = uid, gid, memberships(group, entry[0])
		u.listed = u.groups
		if entry[5] != "" {
			u.home = entry[5]
		}
	default:
		uid, err := id(name)
		if err != nil {
			return user{}, errdefs.Invalidf("user %q is not in the guest's /etc/passwd", name)
		}
		u.uid = uid
		if uid == 0 {
			u.home = "/root"
		}
	}
	if !hasGroup || groupName == "" {
		return u, nil
	}
	if entry := find(group, groupName); entry != nil {
		groupName = entry[2]
	}
	gid, err := id(groupName)
	if err != nil {
		return user{}, errdefs.Invalidf("group %q is not in the guest's /etc/group", groupName)
	}
	u.gid, u.groups = gid, nil // as in container runtimes: a requested group is the only group
	return u, nil
}

// find returns the first entry called key, or otherwise the first whose number is key.
func find(entries [][]string, key string) []string {
	for _, field := range []int{0, 2} {
		if i := slices.IndexFunc(entries, func(e []string) bool { return e[field] == key }); i >= 0 {
			return entries[i]
		}
	}
	return nil
}

// maxGroups is the kernel's limit (NGROUPS_MAX).
const maxGroups = 65536

func memberships(group [][]string, name string) []uint32 {
	var gids []uint32
	for _, e := range group {
		if !slices.Contains(strings.Split(e[3], ","), name) {
			continue
		}
		if gid, err := id(e[2]); err == nil && len(gids) < maxGroups && !slices.Contains(gids, gid) {
			gids = append(gids, gid)
		}
	}
	return gids
}

// id parses a uid or gid; to the kernel, the highest value means "none".
func id(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n == 1<<32-1 {
		return 0, errors.New("not an id")
	}
	return uint32(n), nil
}

// readColon reads the lines of a file like passwd that have at least the given number of fields.
func readColon(file string, fields int) ([][]string, error) {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, errdefs.Invalidf("the guest's %s cannot be read: %w", file, cause(err))
	}
	defer f.Close()
	return parseColon(io.LimitReader(f, 16<<20), fields), nil
}

func parseColon(r io.Reader, fields int) [][]string {
	var entries [][]string
	scan := bufio.NewReaderSize(r, maxUserLine)
	for {
		line, long, err := scan.ReadLine()
		if err != nil {
			return entries
		}
		if long {
			for long && err == nil {
				_, long, err = scan.ReadLine()
			}
			continue
		}
		e := strings.Split(strings.TrimSpace(string(line)), ":")
		if len(e) >= fields && e[0] != "" && !strings.HasPrefix(e[0], "#") {
			entries = append(entries, e)
		}
	}
}
