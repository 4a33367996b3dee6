package nodejson

import (
	"encoding/json"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// BehalfName is the environment variable by which programs tell `cocoon` on whose behalf they run it.
const BehalfName = "COCOON_ON_BEHALF"

// BehalfEnv returns that variable, set to o.
func BehalfEnv(o vm.Owner) string {
	text, _ := json.Marshal(o) // a struct of strings always encodes
	return BehalfName + "=" + string(text)
}

// ParseBehalf reads the value of that variable; "" is the operator. InvalidArgument.
func ParseBehalf(value string) (vm.Owner, error) {
	var o vm.Owner
	if value == "" {
		return o, nil
	}
	if err := json.Unmarshal([]byte(value), &o); err != nil || o.Operator() {
		return o, errdefs.Invalidf("%s does not name a namespace, as in {\"namespace\":\"prod\"}", BehalfName)
	}
	return o, nil
}
