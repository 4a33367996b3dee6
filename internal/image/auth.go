package image

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"maps"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// ParseDockerConfig reads the credentials of a docker configuration ({"auths": {...}}), sorted by registry. It does not
// run the credential helpers named there. Errors are InvalidArgument and never quote the input.
func ParseDockerConfig(data []byte) ([]RegistryAuth, error) {
	var config struct {
		Auths map[string]dockerAuth `json:"auths"`
	}
	if json.Unmarshal(data, &config) != nil { // its error would quote the secret
		return nil, errdefs.Invalidf("it is not a docker configuration")
	}
	return decodeAuths(config.Auths)
}

// ParseDockerCfg is ParseDockerConfig for the old form, which holds only the content of "auths".
func ParseDockerCfg(data []byte) ([]RegistryAuth, error) {
	var auths map[string]dockerAuth
	if json.Unmarshal(data, &auths) != nil {
		return nil, errdefs.Invalidf("it is not a docker configuration")
	}
	return decodeAuths(auths)
}

// dockerAuth is one entry of a docker configuration.
type dockerAuth struct {
	Username      string `json:"username"`
	Password      string `json:"password"`
	Auth          string `json:"auth"` // base64 of user:password; wins over the two fields above
	IdentityToken string `json:"identitytoken"`
	RegistryToken string `json:"registrytoken"`
}

func decodeAuths(all map[string]dockerAuth) ([]RegistryAuth, error) {
	var out []RegistryAuth
	for _, registry := range slices.Sorted(maps.Keys(all)) {
		a, ok := all[registry].decode(registry)
		if !ok {
			return nil, errdefs.Invalidf("the credentials for %q are not user:password in base64", registry)
		}
		out = append(out, a)
	}
	return out, nil
}

func (d dockerAuth) decode(registry string) (RegistryAuth, bool) {
	a := RegistryAuth{Registry: registry, Username: d.Username, Password: d.Password, Token: d.IdentityToken}
	a.Token = cmp.Or(a.Token, d.RegistryToken)
	if d.Auth == "" {
		return a, true
	}
	// Some tools omit the padding.
	plain, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(d.Auth, "="))
	if err != nil {
		return RegistryAuth{}, false
	}
	user, password, ok := strings.Cut(string(plain), ":")
	if !ok {
		return RegistryAuth{}, false
	}
	a.Username, a.Password = user, strings.Trim(password, "\x00")
	return a, true
}
