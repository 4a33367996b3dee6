package cli

import (
	"cmp"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
)

const maxSecretFile = 1 << 20 // bytes

// remoteFlags are the credentials for a registry. A secret is never an argument, which every process could read.
type remoteFlags struct {
	tokenFile, authFile, ca string
}

const remoteHelp = `

URL is [https://]HOST[:PORT]; plain HTTP is used for http:// and for this host's own addresses. Without a tag it is latest.
Credentials are, in this order: the token in --token-file, those of --auth-file for the host, the token in EPOCH_TOKEN.
A certificate authority of your own is trusted with --ca-cert, or EPOCH_CA_CERT.`

func (f *remoteFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVar(&f.tokenFile, "token-file", "", "`FILE` with a bearer token [EPOCH_TOKEN: the token itself]")
	fs.StringVar(&f.authFile, "auth-file", "", "docker config.json `FILE` with credentials for registries")
	fs.StringVar(&f.ca, "ca-cert", "", "PEM `FILE` of certificate authorities to trust as well [EPOCH_CA_CERT]")
}

// auth reads the credentials for the registry of ref.
func (f *remoteFlags) auth(ref string, getenv func(string) string) (snapshot.Auth, error) {
	var a snapshot.Auth
	if ca := cmp.Or(f.ca, getenv("EPOCH_CA_CERT")); ca != "" {
		pem, err := readSmall(ca, "certificate authorities")
		if err != nil {
			return a, err
		}
		a.CA = pem
	}
	switch {
	case f.tokenFile != "":
		token, err := readToken(f.tokenFile)
		if err != nil {
			return a, err
		}
		a.Token = token
	case f.authFile != "":
		all, err := readAuth(f.authFile)
		if err != nil {
			return a, err
		}
		host := registryHost(ref)
		for _, r := range all {
			if registryHost(r.Registry) == host {
				a.Token, a.Username, a.Password = r.Token, r.Username, r.Password
				return a, nil
			}
		}
		return a, errdefs.Invalidf("%s holds no credentials for %s", f.authFile, host)
	default:
		token, err := oneWord(getenv("EPOCH_TOKEN"))
		if err != nil {
			return a, err
		}
		a.Token = token
	}
	return a, nil
}

func readToken(path string) (string, error) {
	data, err := readSmall(path, "the token")
	if err != nil {
		return "", err
	}
	token, err := oneWord(string(data))
	if err == nil && token == "" {
		err = errdefs.Invalidf("%s holds no token", path)
	}
	return token, err
}

func oneWord(token string) (string, error) {
	token = strings.TrimSpace(token)
	if strings.ContainsAny(token, " \t\r\n") {
		return "", errdefs.Invalidf("the token for the registry has blanks in it; it is one word")
	}
	return token, nil
}

// registryHost returns HOST[:PORT] of a reference or of a key in a docker configuration.
func registryHost(ref string) string {
	if _, rest, ok := strings.Cut(ref, "://"); ok {
		ref = rest
	}
	host, _, _ := strings.Cut(ref, "/")
	switch host = strings.ToLower(host); host {
	case "index.docker.io", "registry-1.docker.io":
		return "docker.io"
	}
	return host
}

func readSmall(path, what string) ([]byte, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return nil, errdefs.New(errdefs.InvalidArgument, "read %s: %w", what, err)
	}
	if fi.IsDir() || fi.Size() > maxSecretFile {
		return nil, errdefs.Invalidf("read %s: %s is a folder or too large", what, path)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, errdefs.New(errdefs.InvalidArgument, "read %s: %w", what, err)
	}
	return data, nil
}
