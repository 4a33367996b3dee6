// Package logins keeps the credentials of registries that operators give to an appliance.
//
// It fetches nothing, and shows no secret: Find is for those who fetch.
package logins

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
)

// Limits of what is stored.
const (
	maxRegistries = 100
	maxUser       = 512      // bytes
	maxPassword   = 16 << 10 // bytes; tokens are long
	maxFile       = 4 << 20  // bytes
)

// dockerHub is the name by which Docker Hub is stored, and the one that it has in docker's files.
const dockerHub = "docker.io"

// hubs are the names of Docker Hub.
var hubs = []string{dockerHub, "index.docker.io", "registry-1.docker.io", "registry.hub.docker.com"}

// Store keeps credentials in a file of docker's form, which only its owner can read. Safe for concurrent use.
type Store struct {
	path string

	mu    sync.Mutex
	all   map[string]image.RegistryAuth // by host[:port]
	fault error                         // why the file could not be read; it is left as it is
}

// Open reads the file at path, which need not exist. A file that cannot be read gives an empty store, in which nothing can be stored.
func Open(path string) *Store {
	s := &Store{path: path, all: map[string]image.RegistryAuth{}}
	s.fault = s.load()
	return s
}

func (s *Store) load() error {
	info, err := os.Lstat(s.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("credentials of registries: %w", err)
	case !info.Mode().IsRegular() || info.Mode().Perm()&0o077 != 0 || info.Size() > maxFile:
		return s.damaged()
	}
	data, err := os.ReadFile(s.path)
	if err != nil {
		return fmt.Errorf("credentials of registries: %w", err)
	}
	found, err := image.ParseDockerConfig(data)
	if err != nil {
		return s.damaged()
	}
	for _, a := range found {
		if host, err := Host(a.Registry); err != nil || host != a.Registry {
			return s.damaged()
		}
		s.all[a.Registry] = a
	}
	return nil
}

func (s *Store) damaged() error {
	return errdefs.DataLossf("the file %s with the credentials of registries is damaged or others can read it; remove it, and log in again", s.path)
}

var hostForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)

// Host returns the name under which the credentials of a registry are stored. Errors: InvalidArgument.
func Host(registry string) (string, error) {
	host := strings.ToLower(registry)
	name, port := host, ""
	if h, p, err := net.SplitHostPort(host); err == nil {
		name, port = h, p
		if n, err := strconv.ParseUint(p, 10, 16); err != nil || n == 0 || strconv.FormatUint(n, 10) != p {
			name = ""
		}
	}
	ip := net.ParseIP(strings.Trim(name, "[]"))
	if len(host) > 255 || !hostForm.MatchString(name) && ip == nil || ip != nil && ip.To4() == nil && port == "" && !strings.HasPrefix(name, "[") {
		return "", errdefs.Invalidf("%.100q is not the name of a registry; use HOST or HOST:PORT, without a path", registry)
	}
	if slices.Contains(hubs, host) {
		return dockerHub, nil
	}
	return host, nil
}

// Login stores credentials instead of those that the registry may have.
// Errors: InvalidArgument, ResourceExhausted, DataLoss.
func (s *Store) Login(registry, user, password string) error {
	host, err := Host(registry)
	switch {
	case err != nil:
		return err
	case user == "" || len(user) > maxUser || strings.ContainsFunc(user, func(r rune) bool { return r < ' ' || r == ':' || r == 0x7f || r == 0xfffd }):
		return errdefs.Invalidf("the user name is not 1 to %d bytes of printable text without a colon", maxUser)
	case password == "" || len(password) > maxPassword || strings.ContainsAny(password, "\x00\r\n"):
		return errdefs.Invalidf("the password is empty, has a line break or a zero byte, or more than %d bytes", maxPassword)
	}
	return s.change(func(all map[string]image.RegistryAuth) error {
		if _, ok := all[host]; !ok && len(all) >= maxRegistries {
			return errdefs.Exhaustedf("there are credentials for %d registries; remove some", maxRegistries)
		}
		all[host] = image.RegistryAuth{Registry: host, Username: user, Password: password}
		return nil
	})
}

// Logout forgets the credentials of a registry. Errors: InvalidArgument, NotFound, DataLoss.
func (s *Store) Logout(registry string) error {
	host, err := Host(registry)
	if err != nil {
		return err
	}
	return s.change(func(all map[string]image.RegistryAuth) error {
		if _, ok := all[host]; !ok {
			return errdefs.NotFoundf("there are no credentials for registry %s", host)
		}
		delete(all, host)
		return nil
	})
}

// change stores what edit makes of a copy. The file is replaced as a whole, and its change survives a power cut.
func (s *Store) change(edit func(map[string]image.RegistryAuth) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fault != nil {
		return s.fault
	}
	next := make(map[string]image.RegistryAuth, len(s.all)+1)
	type entry struct {
		Auth string `json:"auth"`
	}
	file := struct {
		Auths map[string]entry `json:"auths"`
	}{map[string]entry{}}
	for host, a := range s.all {
		next[host] = a
	}
	if err := edit(next); err != nil {
		return err
	}
	for host, a := range next {
		file.Auths[host] = entry{base64.StdEncoding.EncodeToString([]byte(a.Username + ":" + a.Password))}
	}
	data, err := json.Marshal(file)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(s.path), 0o700); err != nil {
		return err
	}
	if err := atomicfile.WriteFile(s.path, data, 0o600); err != nil {
		return fmt.Errorf("store the credentials of registries: %w", err)
	}
	s.all = next
	return nil
}

// Login is a registry with credentials, without its secret.
type Login struct{ Registry, Username string }

// List returns the registries with credentials, sorted. Errors: DataLoss.
func (s *Store) List() ([]Login, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []Login
	for host, a := range s.all {
		all = append(all, Login{host, a.Username})
	}
	slices.SortFunc(all, func(a, b Login) int { return strings.Compare(a.Registry, b.Registry) })
	return all, s.fault
}

// Find returns the credentials for an image by the host in its name; none for a name without one that has some, and for a URL.
func (s *Store) Find(name string) []image.RegistryAuth {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a, ok := s.all[hostOf(name)]; ok {
		return []image.RegistryAuth{a}
	}
	return nil
}

// hostOf returns the registry of an image, as it is stored; "" for a URL.
func hostOf(name string) string {
	if strings.Contains(name, "://") {
		return ""
	}
	first, _, ok := strings.Cut(name, "/")
	if !ok || !strings.ContainsAny(first, ".:") && first != "localhost" {
		return dockerHub // as docker reads names
	}
	host, err := Host(first)
	if err != nil {
		return ""
	}
	return host
}
